"""What lies in spec/ is generated from the code, or compared with it."""
