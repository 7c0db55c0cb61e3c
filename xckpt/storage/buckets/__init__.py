"""What a bucket does on its own side, for which TensorStore has no call, and what it hides."""
