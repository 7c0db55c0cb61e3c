"""Implementations that the suite knows how to judge; each imports what it wraps and no other."""
