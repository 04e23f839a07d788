"""The smallest images that every network of the table can be run on, and their data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mucudnn.ir.graph import Graph
from mucudnn.ir.initializers import fans
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE, LABEL, get_model
from mucudnn.models.model import Model
from mucudnn.models.unet import narrow_unet2d, narrow_unet3d


@dataclass(frozen=True)
class Case:
    """A network and the smallest image its layers leave something of.

    Batch norm over fewer than four values is avoided: it would make signs of numbers,
    and gradients of nothing but rounding.
    """

    name: str
    image: int
    batch: int = 2

    def __str__(self) -> str:
        return self.name

    def graph(
        self, *, dtype: str = "float64", training: bool = True, classes: int = 11
    ) -> Graph:
        model = get_model(self.name)
        return model(
            self.batch,
            image=self.image,
            classes=classes,
            dtype=dtype,
            training=training,
        )


CASES = (
    Case("alexnet", 67),
    Case("alexnet_owt", 63),
    Case("cifar_quick", 16),
    Case("densenet40", 8),
    Case("densenet121", 64),
    Case("digits", 8),
    Case("googlenet", 64),
    Case("googlenet_plain", 64),
    Case("inception_v4", 107),
    Case("lenet", 16),
    Case("overfeat", 71),
    Case("resnet18", 64),
    Case("resnet20", 8),
    Case("resnet32", 8),
    Case("resnet34", 64),
    Case("resnet44", 8),
    Case("resnet50", 64),
    Case("resnet56", 8),
    Case("resnet101", 64),
    Case("resnet110", 8),
    Case("resnet152", 64),
    Case("unet2d", 16, 1),
    Case("unet2d_bn", 16, 4),
    Case("unet3d", 8, 4),
    Case("unet3d_plain", 8, 1),
    Case("vgg16", 32),
    Case("vgg19", 32),
    Case("vgg116", 32, 1),
    Case("vgg216", 32, 1),
    Case("vgg316", 32, 1),
    Case("vgg416", 32, 1),
    Case("resnet:1,2,3,1", 71),
)


NARROW = {
    "unet2d": narrow_unet2d(12),
    "unet2d_bn": narrow_unet2d(12, batch_norm=True),
    "unet3d": narrow_unet3d(4),
    "unet3d_plain": narrow_unet3d(4, batch_norm=False),
}
"""U-Nets of less than a fifth of the width: the same graphs, little arithmetic."""


def narrow_model(name: str) -> Model:
    """A network of the table, but a U-Net is a narrow one."""
    return NARROW.get(name) or get_model(name)


def random_feeds(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """An array for every input of a graph, of a scale that keeps signals alive."""
    rng = np.random.default_rng(seed)
    return dict(_feeds(graph, rng))


def _feeds(graph: Graph, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    classes = _classes(graph)
    for name in graph.inputs:
        spec = graph.tensors[name]
        if name == LABEL:
            yield name, rng.integers(classes, size=spec.shape)
        elif spec.dtype == "int64":
            yield name, np.array(3)
        elif name == IMAGE or spec.role is Role.INPUT:
            yield name, rng.standard_normal(spec.shape).astype(spec.dtype)
        elif len(spec.shape) > 1:
            kind = np.float32 if spec.dtype == "float32" else np.float64
            w = rng.standard_normal(spec.shape, dtype=kind)
            w *= np.sqrt(2 / fans(spec.shape)[0])
            yield name, w
        else:
            start = 1.0 if name.endswith(("norm/weight", "var")) else 0.0
            noise = 0.2 * rng.random(spec.shape) - 0.1
            yield name, (start + noise).astype(spec.dtype)


def _classes(graph: Graph) -> int:
    loss = (n for n in graph.nodes if n.op == "softmax_cross_entropy")
    return min((graph.tensors[n.inputs[0]].shape[1] for n in loss), default=1)


def furthest(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> tuple[float, str]:
    """The largest error of any gradient, relative to its largest value, and whose.

    A gradient that should vanish, such as that of a bias ahead of batch norm, is held
    against a hundredth of the largest one. Gradients are all of them, or those named
    `d x`: what else there is then, such as a count of images, is held against itself.
    """
    assert found.keys() == expected.keys()
    sizes = {name: float(np.abs(g).max()) for name, g in expected.items()}
    gradients = {name for name in sizes if name.startswith("d ")} or set(sizes)
    least = 1e-2 * max(sizes[name] for name in gradients)
    worst = 0.0, ""
    for name, g in expected.items():
        size = max(sizes[name], least) if name in gradients else sizes[name]
        error = float(np.abs(found[name] - g).max()) / (size or 1.0)
        worst = max(worst, (error if np.isfinite(error) else np.inf, name))
    return worst
