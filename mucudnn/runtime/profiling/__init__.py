"""Measure kernels, links and memory mapping on a device."""
