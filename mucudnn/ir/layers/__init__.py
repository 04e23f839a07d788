"""Layers: a function each, from names of tensors to the name of its result.

A layer checks the shapes of what it reads, declares its parameters, appends nodes to
the builder, and returns the name of its result. Layers of one's own are written the
same way.
"""
