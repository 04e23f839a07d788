"""Data-parallel training of PyTorch models on unequal devices."""
