"""Chunks that lie in zarr shards: one object for several, written and read as one."""
