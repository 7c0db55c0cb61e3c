"""What a storage can do and permits, found by a save's own requests: for `xckpt doctor`."""
