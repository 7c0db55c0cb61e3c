"""Mappings of a model extended to the states of its optimizer."""
