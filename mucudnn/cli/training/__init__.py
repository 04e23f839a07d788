"""`mucudnn train`: options, processes, results."""
