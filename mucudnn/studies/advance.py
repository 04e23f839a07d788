"""Report progress of a study layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from mucudnn.suites import Layer

__all__ = ["Advance", "advancing"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Advance(Generic[R]):
    """Progress of a study: a layer begun, or (with a result) done."""

    layer: Layer
    index: int
    total: int
    result: R | None = None


def advancing(
    layers: Sequence[Layer],
    work: Callable[[Layer, int], R],
    tell: Callable[[Advance[R]], None] | None,
) -> Iterator[R]:
    """Yield a result per layer, each before its report, so that Ctrl-C keeps it.

    `work` gets a layer and the number of layers left, with this one.
    """
    say = tell or (lambda at: None)
    for i, layer in enumerate(layers):
        begun: Advance[R] = Advance(layer, i, len(layers))
        say(begun)
        result = work(layer, len(layers) - i)
        yield result
        say(replace(begun, result=result))
