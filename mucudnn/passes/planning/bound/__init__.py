"""Lower bound of the step time within a budget, by a linear program."""
