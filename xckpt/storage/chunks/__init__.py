"""Single chunks, and many of them in flight: what every read of a checkpoint goes through."""
