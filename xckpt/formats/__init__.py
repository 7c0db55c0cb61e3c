"""Other libraries' checkpoints, read and written without importing those libraries."""
