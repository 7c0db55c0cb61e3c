"""What a `xckpt.CheckpointManager` does in the root of its run."""
