"""Corrupt twins of golden checkpoints, and the confined processes that read them."""
