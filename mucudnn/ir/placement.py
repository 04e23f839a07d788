"""Names of the placement modes of a step's tensors."""

__all__ = ["PLACEMENTS", "STATIC", "VIRTUAL"]

STATIC, VIRTUAL = "static", "virtual"
PLACEMENTS = (STATIC, VIRTUAL)
"""Contiguous tensors only; or also tensors mapped page by page to consecutive virtual
addresses, if that needs less memory or is faster."""
