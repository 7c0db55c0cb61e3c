"""What a rank of a load reads, in columns."""
