"""Layer by layer through a study, telling when each begins and when it is done."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from mucudnn.suites import Layer

__all__ = ["Advance", "advancing"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Advance(Generic[R]):
    """Where a study has got to: a layer begun, or (with a result) done."""

    layer: Layer
    index: int
    total: int
    result: R | None = None


def advancing(
    layers: Sequence[Layer],
    work: Callable[[Layer, int], R],
    tell: Callable[[Advance[R]], None] | None,
) -> Iterator[R]:
    """Results in order, each before anybody is told of it: Ctrl-C keeps what is done.

    Args:
        layers: What to work on.
        work: Makes a result of a layer; how many are left, itself included, is said.
        tell: Called when a layer begins and when it is done.
    """
    say = tell or (lambda at: None)
    for i, layer in enumerate(layers):
        begun: Advance[R] = Advance(layer, i, len(layers))
        say(begun)
        result = work(layer, len(layers) - i)
        yield result
        say(replace(begun, result=result))
