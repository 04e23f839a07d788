"""In which order nodes run."""
