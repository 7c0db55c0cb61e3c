"""Orbax checkpoints: a tree of zarr arrays, plain or in an OCDBT database."""
