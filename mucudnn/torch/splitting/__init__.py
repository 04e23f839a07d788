"""PyTorch's graphs cut along the batch: where the batch is, and calls of slices."""
