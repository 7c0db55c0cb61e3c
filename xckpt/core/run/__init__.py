"""A run of checkpoints: its steps, their names, and which of them are saved and kept."""
