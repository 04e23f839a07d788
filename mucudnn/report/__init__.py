"""Show: comparisons as text, DeepBench's table, or one HTML file."""
