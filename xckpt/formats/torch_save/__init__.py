"""Files that ``torch.save`` writes, read without torch and without unpickling."""
