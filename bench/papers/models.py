"""SuperNeurons' networks by name."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from bench.papers.inception import inception_v4
from bench.papers.layers import Network
from bench.papers.networks import BLOCKS, alexnet, resnet, vgg16

__all__ = ["MODELS"]

MODELS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {
        "alexnet": alexnet,
        "vgg16": vgg16,
        **{name: partial(resnet, blocks) for name, blocks in BLOCKS.items()},
        "inception_v4": inception_v4,
    }
)
"""Name -> builder; its one argument, if given, is the image's height and width."""
