"""Wrap a user's function as a network, and validate its graphs.

The function takes the batch size and any of `image`, `classes`, `dtype`, `training` and
`seed`. It returns a graph with the inputs `image` and `label` and the loss as its first
output.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import Graph, Role
from mucudnn.ir.shapes import Ints
from mucudnn.models.model import IMAGE, LABEL, class_count, full_image

__all__ = ["FunctionModel"]

_OPTIONS = ("image", "classes", "dtype", "training", "seed")


@dataclass(frozen=True, slots=True)
class FunctionModel:
    """A network defined by a function of the batch size.

    Attributes:
        function: Function that returns the graph.
        name: Name in messages.

    Raises:
        TypeError: The function cannot be called with a batch size alone.
    """

    function: Callable[..., Graph]
    name: str

    def __post_init__(self) -> None:
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # written in C; calling it reports wrong arguments
            return
        try:
            signature.bind(1)
        except TypeError as e:
            raise TypeError(
                f"{self.name} cannot be called with a batch alone: {e}; a network is a "
                f"function of (batch) and, if it likes, of {', '.join(_OPTIONS)}"
            ) from e

    @property
    def image(self) -> tuple[int, ...]:
        """Default shape of an image: (C, *spatial)."""
        return self(1).tensors[IMAGE].shape[1:]

    @property
    def classes(self) -> int:
        """Default number of classes; 2 where the loss does not tell."""
        return class_count(self(1)) or 2

    @property
    def flexible(self) -> bool:
        """Whether the function takes a number of classes."""
        return "classes" in self._accepted_options()

    def __call__(
        self,
        batch: int,
        *,
        image: Ints | None = None,
        classes: int | None = None,
        dtype: str = "float32",
        training: bool = True,
        seed: int = 0,
    ) -> Graph:
        """Return the forward graph with its loss.

        Raises:
            ValueError: The graph does not match the arguments.
            TypeError: The function does not return a graph.
        """
        an_integer("batch", batch, least=1)
        shape = None if image is None else full_image(image, self.image)
        asked = {
            "image": shape,
            "classes": classes,
            "dtype": dtype,
            "training": training,
            "seed": seed,
        }
        accepted = self._accepted_options()
        given = {k: v for k, v in asked.items() if k in accepted and v is not None}
        graph = self.function(batch, **given)
        self._check(graph)
        self._check_as_asked(graph, batch, shape, classes, dtype)
        if not training:
            self._check_evaluates(graph)
        return graph

    def _accepted_options(self) -> frozenset[str]:
        try:
            parameters = inspect.signature(self.function).parameters
        except ValueError:
            return frozenset()
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return frozenset(_OPTIONS)
        return frozenset(parameters) & frozenset(_OPTIONS)

    def _check(self, graph: object) -> None:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"{self.name} returned {type(graph).__name__}, not a Graph; end it "
                "with `return g.build(loss, g.accuracy(logits, label))`"
            )
        found = [spec.name for spec in graph.with_role(Role.INPUT)]
        if not {IMAGE, LABEL} <= set(found):
            raise ValueError(
                f"{self.name} returned a graph with the inputs "
                f"{', '.join(found) or 'none'}; {IMAGE!r} and {LABEL!r} are wanted"
            )
        if not graph.outputs or graph.tensors[graph.outputs[0]].shape != ():
            raise ValueError(
                f"{self.name} returned a graph whose first output is no loss; give "
                "build() a scalar first, such as g.softmax_cross_entropy(...) returns"
            )

    def _check_as_asked(
        self,
        graph: Graph,
        batch: int,
        image: tuple[int, ...] | None,
        classes: int | None,
        dtype: str,
    ) -> None:
        spec, count = graph.tensors[IMAGE], class_count(graph)
        differences: list[tuple[str, Any, Any]] = [("batch", batch, spec.shape[0])]
        if image is not None:
            differences.append(("image", image, spec.shape[1:]))
        if classes is not None and count is not None and count < classes:
            differences.append(("classes", classes, count))
        differences.append(("dtype", dtype, spec.dtype))
        for name, wanted, found in differences:
            if wanted != found:
                raise ValueError(
                    f"{self.name} was asked for {name} {wanted} and returned a graph "
                    f"with {name} {found}; let the function take `{name}` and use it"
                )

    def _check_evaluates(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.mutates or node.traits.random:
                raise ValueError(
                    f"{self.name} was asked for a graph for evaluation and returned "
                    f"one with {node.op}, which is for training; let the function "
                    "take `training` and hand it to GraphBuilder(training=training)"
                )
