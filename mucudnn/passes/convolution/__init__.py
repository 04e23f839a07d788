"""Convolution plans: Pareto fronts, workspace division and explanations."""
