"""Convolution in the Fourier domain: transforms by matrix product."""
