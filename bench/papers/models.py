"""SuperNeurons' networks by name, and every other one that the library has."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from bench.papers.inception import inception_v4
from bench.papers.layers import Network
from bench.papers.networks import BLOCKS, alexnet, resnet, vgg16
from bench.papers.translate import translate
from mucudnn.models import get_model

__all__ = ["MODELS", "network", "of_library"]

MODELS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {
        "alexnet": alexnet,
        "vgg16": vgg16,
        **{name: partial(resnet, blocks) for name, blocks in BLOCKS.items()},
        "inception_v4": inception_v4,
    }
)
"""Name -> builder; its one argument, if given, is the image's height and width."""


def network(name: str, image: int | None = None) -> Network:
    """A network by its name: the paper's own, or else the library's.

    Args:
        name: A key of `MODELS`, or what `mucudnn.models.get_model` takes.
        image: Height and width; by default the paper's, or the library's.

    Raises:
        ValueError: Nothing has that name, the account does not know its layers, or the
            image is too small for them.
    """
    if name in MODELS:
        return MODELS[name]() if image is None else MODELS[name](image)
    return translate(get_model(name)(1, image=image), name)


def of_library(name: str) -> str:
    """What the library calls one of `MODELS`."""
    if name in BLOCKS:
        return "resnet:" + ",".join(map(str, BLOCKS[name]))
    return name
