"""The training step of a network, under the name that others import it by."""

from mucudnn.passes.graph.autodiff import training_graph

__all__ = ["training_graph"]
