"""Choose whether and how to split a step into slices to fit a budget."""
