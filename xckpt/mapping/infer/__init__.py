"""Mappings inferred from the names and shapes of two models."""
