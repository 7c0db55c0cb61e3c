"""Single chunks, and many of them in flight: every read of a checkpoint comes through here."""
