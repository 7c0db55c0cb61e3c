"""Files and zarr arrays of other libraries, local or in a bucket, read by range."""
