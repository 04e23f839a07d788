"""Layers: a function each, from names of tensors to the name of its result."""
