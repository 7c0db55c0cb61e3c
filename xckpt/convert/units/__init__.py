"""Units of work of a conversion: what they are, how they are planned, read, made and run."""
