"""torch's sharded tensors: DTensor, ShardedTensor and LocalShardsWrapper."""
