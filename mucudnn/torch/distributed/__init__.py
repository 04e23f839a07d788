"""A PyTorch model trained in step on unequal devices, by its own DDP."""
