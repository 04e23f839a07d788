"""Networks as functions of the batch size: common inputs, loss and accuracy.

A body maps an image to logits; `Model` adds the inputs, the loss and the counts of
correct answers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mucudnn.arguments import an_integer, integers
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import Graph
from mucudnn.ir.shapes import Ints

__all__ = ["IMAGE", "LABEL", "Body", "Model", "class_count", "full_image"]

IMAGE = "image"
"""Name of the input of images, (N, C, *spatial)."""

LABEL = "label"
"""Name of the input of labels: int64 (N,), or (N, *spatial) per pixel."""

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
        n = an_integer("batch", batch, least=1)
        shape = self.image if image is None else full_image(image, self.image)
        count = (
            self.classes if classes is None else an_integer("classes", classes, least=2)
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
        side = an_integer("image", image, least=1)
        return (channels, *(side for _ in sides))
    sizes = integers("image", image, least=1)
    shape = (channels, *sizes) if len(sizes) == len(sides) else sizes
    if len(shape) != len(own):
        raise ValueError(
            f"image {shape} has {len(shape)} sizes; a side, {len(sides)} sides, or "
            f"channels and {len(sides)} sides are wanted, such as {own}"
        )
    return shape


def class_count(graph: Graph) -> int | None:
    """Return the number of classes in a network's loss; None if unknown."""
    for node in graph.nodes:
        if node.op == "softmax_cross_entropy" and LABEL in node.inputs:
            return graph.tensors[node.inputs[0]].shape[1]
    return None
