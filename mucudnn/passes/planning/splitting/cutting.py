"""Ways to split a step: whole, in micro-batches, or in spatial tiles of its images.

Only the largest layers get the full number of parts, by a limit on bytes. Where no
operation couples the batch, all layers are split alike, and each slice runs forward and
backward in turn: gradient accumulation within one step. Spatial tiles are worth trying
for small batches, as halo rows cost copies that micro-batches do not. An inference
graph may be split throughout, patch by patch, such that inputs are freed early (Lin et
al., MCUNetV2, 2021). This needs the least memory with long skip connections, and
multiplies the launches by the number of tiles.
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
"""How a step is split: `auto` (the fastest predicted way), `none`, a number of slices
of the batch, `height` (tiles of the images), or `height:4` (a number of tiles)."""

_TRIED = (2, 4, 8, 16)
"""Numbers of parts of the largest layers to try."""

_FEW = 4
"""Samples from which on `auto` does not try tiles."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes of a phase with the same number of parts.

    Attributes:
        phase: Phase of the step.
        first: Name of the first node.
        last: Name of the last node.
        parts: Number of parts.
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
        """Return the segment as JSON-compatible values."""
        words = {"phase": self.phase.value, "first": self.first, "last": self.last}
        return words | {"parts": self.parts, "along": self.along}


@dataclass(frozen=True, slots=True)
class Cutting:
    """One way to split a step.

    Attributes:
        parts: Number of parts of the largest layers; 1 for the whole step.
        along: `batch`, or `height` of images (depth of volumes).
        throughout: Whether small layers have as many parts.
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
        """Return whether another cutting differs only in the number of parts."""
        return replace(other, parts=self.parts) == self

    def axis(self, graph: Graph) -> Along:
        """Return the axis of a graph to split along."""
        return along_batch(graph) if self.along == BATCH else along_height(graph)

    def parts_of(self, graph: Graph) -> Mapping[str, int] | int:
        """Return the number of parts of each node, or of all nodes."""
        if self.throughout:
            return self.parts
        if self.along == BATCH and not (trains(graph) and couples_batch(graph)):
            return self.parts
        axis = self.axis(graph)
        limit = largest_rows(graph, axis) / self.parts
        return parts_by_bytes(graph, limit, most=self.parts, along=axis)

    def cut(self, graph: Graph) -> Graph:
        """Return a training graph, split."""
        if self.parts == 1:
            return graph
        return split_along(graph, self.parts_of(graph), self.axis(graph))

    def segments(self, graph: Graph) -> tuple[Segment, ...]:
        """Return runs of nodes with equally many parts, unsplit ones left out."""
        return () if self.parts == 1 else tuple(self._segments(graph))

    def kept_whole(self, graph: Graph) -> str:
        """Return a message on unsplit forward operations; empty if all are split."""
        splittable = cuttable(graph, self.axis(graph))
        unsplit = [
            node
            for node in graph.nodes
            if node.phase is Phase.FORWARD
            and node.name not in splittable
            and node.inputs
        ]
        if self.parts == 1 or not unsplit:
            return ""
        operations = ", ".join(dict.fromkeys(node.op for node in unsplit))
        what = "samples" if self.along == BATCH else "rows of images"
        return f"kept whole, not computed by {what}: {operations}"

    def _segments(self, graph: Graph) -> Iterator[Segment]:
        splittable, parts = cuttable(graph, self.axis(graph)), self.parts_of(graph)
        open_: Segment | None = None
        for node in graph.nodes:
            if node.name not in splittable:
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
    """Raise a `ValueError` or a `TypeError` for an invalid split."""
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
    """Return the cutting that a split names; None if it is to be chosen."""
    check_split(split)
    if isinstance(split, int):
        return Cutting(min(split, batch_of(graph)))
    _, colon, number = split.partition(":")
    if colon:
        return Cutting(int(number), HEIGHT)
    return Cutting(1) if split == WHOLE else None


def cuttings(graph: Graph, split: Split) -> Iterator[Cutting]:
    """Yield the cuttings that a split allows, the whole step first."""
    asked = cutting_of(graph, split)
    if asked is not None:
        yield from _with_tiles_throughout(graph, [asked])
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
    yield from _with_tiles_throughout(graph, strips)


def _with_tiles_throughout(graph: Graph, ways: Sequence[Cutting]) -> Iterator[Cutting]:
    """Yield cuttings; for an inference graph, tiles throughout as well."""
    yield from ways
    if not trains(graph):
        strips = (way for way in ways if way.along == HEIGHT and way.parts > 1)
        yield from (replace(way, throughout=True) for way in strips)


def trains(graph: Graph) -> bool:
    """Return whether there is a backward pass; without one it is an inference graph."""
    return any(node.phase is not Phase.FORWARD for node in graph.nodes)


def couples_batch(graph: Graph) -> bool:
    """Return whether an operation of the step couples the samples of the batch."""
    batch = along_batch(graph)
    splittable = cuttable(graph, batch)
    coupled = any(
        cut_as(graph.tensors, node, batch) is None
        for node in graph.nodes
        if node.name in splittable
    )
    large = largest_rows(graph)
    unsplit = (n for n in graph.nodes if n.name not in splittable and n.inputs)
    return coupled or any(
        graph.tensors[name].nbytes >= large for node in unsplit for name in node.tensors
    )
