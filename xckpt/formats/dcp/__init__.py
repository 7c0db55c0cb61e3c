"""Folders that torch.distributed.checkpoint writes."""
