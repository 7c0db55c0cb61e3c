"""Saves that share what did not change with an earlier checkpoint, their base."""
