"""Zarr shards: several chunks in one object."""
