"""`xckpt doctor`: what is installed, what a storage can do, and what will be slow there and why."""
