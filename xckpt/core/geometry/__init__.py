"""Boxes, grids and strides: the arithmetic of which elements lie where. NumPy only."""
