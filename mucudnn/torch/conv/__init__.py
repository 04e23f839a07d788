"""Convolutions of unmodified PyTorch models, planned one by one."""
