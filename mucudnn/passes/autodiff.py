"""Public import path of `training_graph`."""

from mucudnn.passes.graph.autodiff import training_graph

__all__ = ["training_graph"]
