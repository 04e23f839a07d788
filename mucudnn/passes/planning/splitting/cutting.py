"""How a step may be cut: whole, in slices of its batch, or in strips of its images.

Only the largest layers are in so many parts: nodes are cut by a limit on bytes. Where
nothing couples the batch, slices of it are all alike instead, forward and backward one
at a time: gradient accumulation within one step. Strips are worth trying where there
are few samples; rows that windows reach over cost copies that slices do not. A network
that only answers may be cut throughout: patch by patch, what was read is gone (Lin et
al., MCUNetV2, 2021). That needs least where skips are long, and takes as many times the
launches as there are strips.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.graph.slicing.axis import (
    Along,
    along_batch,
    along_height,
    batch_of,
    cut_as,
    cuttable,
)
from mucudnn.passes.graph.slicing.parts import largest_rows, parts_by_bytes
from mucudnn.passes.graph.split import split_along

__all__ = [
    "AUTO",
    "BATCH",
    "HEIGHT",
    "WHOLE",
    "Cutting",
    "Segment",
    "Split",
    "check_split",
    "couples_batch",
    "cutting_of",
    "cuttings",
    "trains",
]

AUTO: Literal["auto"] = "auto"
WHOLE: Literal["none"] = "none"
BATCH: Literal["batch"] = "batch"
HEIGHT: Literal["height"] = "height"

Split = str | int
"""Whether a step is split: `auto`, as is predicted to be best; `none`, not at all; into
so many slices of its batch; or `height`, into strips of its images, `height:4` into so
many."""

_TRIED = (2, 4, 8, 16)
"""Parts of the largest layers."""

_FEW = 4
"""Samples from which on strips are not tried unless asked for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes behind each other that are cut into the same number of parts.

    Attributes:
        phase: Of the step.
        first: The first of them.
        last: The last.
        parts: How many.
        along: `batch` or `height`.
    """

    phase: Phase
    first: str
    last: str
    parts: int
    along: str = BATCH

    def __str__(self) -> str:
        kind = Cutting(self.parts, self.along)
        return f"{self.phase.value}: {self.first} to {self.last} in {kind}"

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        words = {"phase": self.phase.value, "first": self.first, "last": self.last}
        return words | {"parts": self.parts, "along": self.along}


@dataclass(frozen=True, slots=True)
class Cutting:
    """One way to cut a step.

    Attributes:
        parts: Of its largest layers; 1 if it is whole.
        along: `batch`, or `height`: of images, or the depth of volumes.
        throughout: Whether the small layers are in as many.
    """

    parts: int
    along: str = BATCH
    throughout: bool = False

    def __str__(self) -> str:
        if self.parts == 1:
            return "whole"
        name = f"{self.parts} {'parts' if self.along == BATCH else 'strips'}"
        return f"{name} throughout" if self.throughout else name

    def like(self, other: "Cutting") -> bool:
        """Whether another one differs in the number of parts alone."""
        return replace(other, parts=self.parts) == self

    def axis(self, graph: Graph) -> Along:
        """What a graph is cut along.

        Raises:
            ValueError: The graph has nothing that can be cut along it.
        """
        return along_batch(graph) if self.along == BATCH else along_height(graph)

    def parts_of(self, graph: Graph) -> Mapping[str, int] | int:
        """Parts of each node, so that the largest layers are in so many."""
        if self.throughout:
            return self.parts
        if self.along == BATCH and not (trains(graph) and couples_batch(graph)):
            return self.parts
        axis = self.axis(graph)
        limit = largest_rows(graph, axis) / self.parts
        return parts_by_bytes(graph, limit, most=self.parts, along=axis)

    def cut(self, graph: Graph) -> Graph:
        """A training graph, cut."""
        if self.parts == 1:
            return graph
        return split_along(graph, self.parts_of(graph), self.axis(graph))

    def segments(self, graph: Graph) -> tuple[Segment, ...]:
        """Runs of nodes in the same number of parts, those of one part left out."""
        return () if self.parts == 1 else tuple(self._segments(graph))

    def kept_whole(self, graph: Graph) -> str:
        """Which operations of the forward pass are not cut, and why; empty if all are.

        Those of the backward pass follow them.
        """
        able = cuttable(graph, self.axis(graph))
        left = [
            node
            for node in graph.nodes
            if node.phase is Phase.FORWARD and node.name not in able and node.inputs
        ]
        if self.parts == 1 or not left:
            return ""
        operations = ", ".join(dict.fromkeys(node.op for node in left))
        what = "samples" if self.along == BATCH else "rows of images"
        return f"kept whole, not computed by {what}: {operations}"

    def _segments(self, graph: Graph) -> Iterator[Segment]:
        able, parts = cuttable(graph, self.axis(graph)), self.parts_of(graph)
        open_: Segment | None = None
        for node in graph.nodes:
            if node.name not in able:
                continue
            number = parts if isinstance(parts, int) else parts.get(node.name, 1)
            if open_ is not None and (open_.phase, open_.parts) == (node.phase, number):
                open_ = replace(open_, last=node.name)
                continue
            if open_ is not None and open_.parts > 1:
                yield open_
            open_ = Segment(node.phase, node.name, node.name, number, self.along)
        if open_ is not None and open_.parts > 1:
            yield open_


def check_split(split: object) -> None:
    """Refuse what is no split.

    Raises:
        ValueError: It is another word, or a number below 1.
        TypeError: It is no word and no whole number.
    """
    if not isinstance(split, str):
        an_integer("split", split, least=1)
        return
    word, colon, number = split.partition(":")
    counted = word == HEIGHT and number.isdecimal() and int(number) > 0
    if not (counted if colon else word in (AUTO, WHOLE, HEIGHT)):
        raise ValueError(
            f"a step is split 'auto', 'none', 'height', 'height:4' into so many "
            f"strips, or into a number of parts, not {split!r}"
        )


def cutting_of(graph: Graph, split: Split) -> Cutting | None:
    """The one cutting that is asked for; None where it is to be chosen."""
    check_split(split)
    if isinstance(split, int):
        return Cutting(min(split, batch_of(graph)))
    _, colon, number = split.partition(":")
    if colon:
        return Cutting(int(number), HEIGHT)
    return Cutting(1) if split == WHOLE else None


def cuttings(graph: Graph, split: Split) -> Iterator[Cutting]:
    """Ways to cut a step that a split leaves open, the whole step first.

    Raises:
        ValueError: It is to be cut along its height, and has no images.
    """
    asked = cutting_of(graph, split)
    if asked is not None:
        yield from _with_answers(graph, [asked])
        return
    yield Cutting(1)
    batch = batch_of(graph)
    if split == AUTO:
        yield from (Cutting(parts) for parts in _TRIED if parts <= batch)
        if batch >= _FEW:
            return
    try:
        rows = along_height(graph).size
    except ValueError:
        if split == AUTO:
            return
        raise
    strips = [Cutting(parts, HEIGHT) for parts in _TRIED if parts <= rows]
    yield from _with_answers(graph, strips)


def _with_answers(graph: Graph, ways: Sequence[Cutting]) -> Iterator[Cutting]:
    """The same, and strips throughout of a network that only answers."""
    yield from ways
    if not trains(graph):
        strips = (way for way in ways if way.along == HEIGHT and way.parts > 1)
        yield from (replace(way, throughout=True) for way in strips)


def trains(graph: Graph) -> bool:
    """Whether there is a backward pass; without one a network only answers."""
    return any(node.phase is not Phase.FORWARD for node in graph.nodes)


def couples_batch(graph: Graph) -> bool:
    """Whether samples depend on each other before all of them are known."""
    batch = along_batch(graph)
    able = cuttable(graph, batch)
    coupled = any(
        cut_as(graph.tensors, node, batch) is None
        for node in graph.nodes
        if node.name in able
    )
    large = largest_rows(graph)
    left = (n for n in graph.nodes if n.name not in able and n.inputs)
    return coupled or any(
        graph.tensors[name].nbytes >= large for node in left for name in node.tensors
    )
