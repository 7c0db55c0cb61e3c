"""How saves and loads grow with ranks and tensors, without their processes and without storage."""
