"""Normalizations split into pieces, for slices and fused kernels."""
