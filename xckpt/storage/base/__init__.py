"""Saves that share unchanged chunks with an earlier checkpoint, their base."""
