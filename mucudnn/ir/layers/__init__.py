"""Layers: functions from tensor names to the name of the result.

A layer checks the shapes of its inputs, declares its parameters, appends nodes to the
builder and returns the name of its result. Custom layers are written the same way.
"""
