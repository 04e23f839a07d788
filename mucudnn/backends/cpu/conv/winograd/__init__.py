"""Winograd convolution: transform tiles, multiply, transform back."""
