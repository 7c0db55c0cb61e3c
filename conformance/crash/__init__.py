"""Saves that are cut off anywhere: the disk, the tracer and the scenarios."""
