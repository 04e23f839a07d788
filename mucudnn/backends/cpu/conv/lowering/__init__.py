"""Convolution as a matrix product: gather patches, multiply, scatter."""
