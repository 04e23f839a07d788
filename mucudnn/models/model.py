"""Networks as functions of their batch, built in or given by the user.

A body maps an image to logits; `Model` adds the inputs, the loss and the counts of
correct answers.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.arguments import check_integer, check_integers
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import Ints
from mucudnn.ir.graph import IMAGE, LABEL, Graph
from mucudnn.ir.tensor import Role

Body = Callable[[GraphBuilder, str, int], Sequence[str]]
"""(builder, image, number of classes) -> logits: the main ones, then of side heads."""

_TOP = 5
_MANY_CLASSES = 10


@dataclass(frozen=True, slots=True)
class Model:
    """A network, built when it is called.

    Attributes:
        body: Its layers up to the logits.
        image: Default shape of an image: (C, *spatial).
        classes: Default number of classes.
        side_weight: Weight of the loss of each side head.
    """

    body: Body
    image: tuple[int, ...]
    classes: int
    side_weight: float = 0.0

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
        """Build the forward graph with its loss.

        Args:
            batch: Images in a mini-batch.
            image: Another image size: one side, all sides, or channels and sides.
            classes: Another number of classes.
            dtype: Data type of activations and parameters.
            training: Whether to build for training: with dropout, batch statistics and
                side heads.
            seed: Seed of dropout masks.

        Returns:
            A graph with the inputs `image` and `label`. Its outputs are the loss (the
            mean over the batch), the number of correct answers, and for more than ten
            classes the number of those among the best five.

        Raises:
            ValueError: A size is out of range, or the image too small for the layers;
                the message shows both.
        """
        n = check_integer("batch", batch, least=1)
        shape = self.image if image is None else full_image(image, self.image)
        count = (
            self.classes
            if classes is None
            else check_integer("classes", classes, least=2)
        )
        g = GraphBuilder(dtype=dtype, training=training, seed=seed)
        logits, *sides = self.body(g, g.input(IMAGE, (n, *shape)), count)
        _, _, *spatial = g.shape(logits)
        label = g.input(LABEL, (n, *spatial), "int64")
        loss = g.softmax_cross_entropy(logits, label)
        for side in sides:
            extra = g.softmax_cross_entropy(side, label)
            loss = g.add(loss, g.scale(extra, self.side_weight))
        ks = (1, _TOP) if count > _MANY_CLASSES else (1,)
        return g.build(loss, *(g.accuracy(logits, label, k) for k in ks))


def full_image(image: Ints, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return (C, *spatial), from a full shape, all sides or one side.

    Raises:
        TypeError: A size is no whole number.
        ValueError: The number of sizes is wrong, or a size is below 1.
    """
    channels, *sides = own
    if not isinstance(image, Iterable):
        side = check_integer("image", image, least=1)
        return (channels, *(side for _ in sides))
    sizes = check_integers("image", image, least=1)
    shape = (channels, *sizes) if len(sizes) == len(sides) else sizes
    if len(shape) != len(own):
        raise ValueError(
            f"image {shape} has {len(shape)} sizes; give a side, {len(sides)} sides, "
            f"or channels and {len(sides)} sides, such as {own}"
        )
    return shape


def class_count(graph: Graph) -> int | None:
    """Return the number of classes in a network's loss; None if unknown."""
    for node in graph.nodes:
        if node.op == "softmax_cross_entropy" and LABEL in node.inputs:
            return graph.tensors[node.inputs[0]].shape[1]
    return None


# Wrap a user's function as a network, and validate its graphs.
#
# The function takes the batch size and any of `image`, `classes`, `dtype`, `training`
# and `seed`. It returns a graph with the inputs `image` and `label` and the loss as its
# first output.


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
                f"function of (batch) and optionally {', '.join(_OPTIONS)}"
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
        """True if the function accepts the argument `classes`."""
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
        check_integer("batch", batch, least=1)
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
        # Compare with what was asked for.
        spec, count = graph.tensors[IMAGE], class_count(graph)
        compared: list[tuple[str, Any, Any]] = [("batch", batch, spec.shape[0])]
        if shape is not None:
            compared.append(("image", shape, spec.shape[1:]))
        if classes is not None and count is not None and count < classes:
            compared.append(("classes", classes, count))
        compared.append(("dtype", dtype, spec.dtype))
        for name, wanted, found in compared:
            if wanted != found:
                raise ValueError(
                    f"{self.name} was called with {name} {wanted} and returned a graph "
                    f"with {name} {found}; the function must use its argument `{name}`"
                )
        random = (n for n in graph.nodes if n.mutates or n.traits.random)
        if not training and (node := next(random, None)) is not None:
            raise ValueError(
                f"{self.name} was called for an evaluation graph and returned one "
                f"with {node.op}, which is for training; the function must take "
                "`training` and pass it to GraphBuilder(training=training)"
            )
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
            remedy = "end it with `return g.build(loss, g.accuracy(logits, label))`"
            if isinstance(graph, tuple):
                remedy = (
                    "`mucudnn memory` studies (model, loss_fn, example, optimizer) of "
                    "PyTorch, and mucudnn.torch.train_step trains such a model"
                )
            raise TypeError(
                f"{self.name} returned {type(graph).__name__}, not a Graph; {remedy}"
            )
        found = [spec.name for spec in graph.with_role(Role.INPUT)]
        if not {IMAGE, LABEL} <= set(found):
            raise ValueError(
                f"{self.name} returned a graph with the inputs "
                f"{', '.join(found) or 'none'}; it must have {IMAGE!r} and {LABEL!r}"
            )
        if not graph.outputs or graph.tensors[graph.outputs[0]].shape != ():
            raise ValueError(
                f"{self.name} returned a graph whose first output is not a loss; give "
                "build() a scalar first, such as g.softmax_cross_entropy(...) returns"
            )
