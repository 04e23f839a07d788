"""Convolution in the Fourier domain; the transforms are matrix products."""
