"""A run of checkpoints over several ranks: decisions that all share, and signals."""
