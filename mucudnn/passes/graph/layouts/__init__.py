"""Channels first or last, for each node of a network."""
