"""Normalisations in pieces, so that slices and fused kernels can run them."""
