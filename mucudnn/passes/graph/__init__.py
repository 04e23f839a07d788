"""Graph-to-graph passes that build and transform training steps."""
