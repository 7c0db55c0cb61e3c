"""torch.distributed.checkpoint (DCP) and xckpt's format: one subject a file."""
