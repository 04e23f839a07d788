"""Where bytes lie in an arena of a given size."""
