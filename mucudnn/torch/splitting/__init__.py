"""Division of PyTorch steps into slices of the batch, or strips of images."""
