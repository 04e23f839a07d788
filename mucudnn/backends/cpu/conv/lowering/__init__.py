"""Convolution as a product of matrices: gather patches, multiply, scatter."""
