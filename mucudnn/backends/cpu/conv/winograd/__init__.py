"""Winograd: transform tiles, multiply, transform back."""
