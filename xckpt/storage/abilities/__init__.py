"""What a storage can do and permits, asked as a save asks it: for `xckpt doctor`."""
