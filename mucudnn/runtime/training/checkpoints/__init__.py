"""Training that outlives its process: files, and what stands in them."""
