"""`mucudnn train`: its options, its ranks, what it says."""
