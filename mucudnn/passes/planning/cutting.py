"""Run a step whole or in slices: the alternatives and the result of each."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mucudnn.arguments import check_integer
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.split import split_along
from mucudnn.passes.graph.split_axis import (
    SplitAxis,
    along_batch,
    along_height,
    batch_of,
    cuttable,
    largest_rows,
    parts_by_bytes,
    split_rule,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan

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
        strided: Whether samples are strided in memory, as an LSTM's are: nodes are cut
            as images are along their height, without halos.
    """

    parts: int
    along: str = BATCH
    throughout: bool = False
    strided: bool = False

    def __str__(self) -> str:
        if self.parts == 1:
            return "whole"
        name = f"{self.parts} {'parts' if self.along == BATCH else 'tiles'}"
        return f"{name} throughout" if self.throughout else name

    def like(self, other: "Cutting") -> bool:
        """Return whether another cutting differs only in the number of parts."""
        return replace(other, parts=self.parts) == self

    def axis(self, graph: Graph) -> SplitAxis:
        """Return the axis of a graph to split along."""
        contiguous = self.along == BATCH and not self.strided
        return along_batch(graph) if contiguous else along_height(graph)

    def parts_of(self, graph: Graph) -> Mapping[str, int] | int:
        """Return the number of parts of each node, or of all nodes."""
        if self.throughout or self.strided:
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
        if self.parts == 1:
            return ()
        splittable, parts = cuttable(graph, self.axis(graph)), self.parts_of(graph)

        def kind(node: Node) -> tuple[Phase, int]:
            own = parts if isinstance(parts, int) else parts.get(node.name, 1)
            return node.phase, own

        cut = [node for node in graph.nodes if node.name in splittable]
        runs = ((*key, list(run)) for key, run in itertools.groupby(cut, kind))
        return tuple(
            Segment(phase, run[0].name, run[-1].name, number, self.along)
            for phase, number, run in runs
            if number > 1
        )

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


def check_split(split: object) -> None:
    """Raise a `ValueError` or a `TypeError` for an invalid split."""
    if not isinstance(split, str):
        check_integer("split", split, least=1)
        return
    word, colon, number = split.partition(":")
    counted = word == HEIGHT and number.isdecimal() and int(number) > 0
    if not (counted if colon else word in (AUTO, WHOLE, HEIGHT)):
        raise ValueError(
            "split must be 'auto', 'none', 'height', 'height:N' for N spatial tiles, "
            f"or a number of micro-batches, got {split!r}"
        )


def cutting_of(graph: Graph, split: Split) -> Cutting | None:
    """Return the cutting that a split names; None if it is to be chosen."""
    check_split(split)
    if not isinstance(split, str):
        if has_strided_samples(graph):
            return Cutting(min(int(split), along_height(graph).size), strided=True)
        return Cutting(min(int(split), batch_of(graph)))
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
    if split == AUTO and has_strided_samples(graph):
        samples = along_height(graph).size
        ways = (Cutting(parts, strided=True) for parts in _TRIED)
        yield from (way for way in ways if way.parts <= samples)
        return
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


def has_strided_samples(graph: Graph) -> bool:
    """Return whether nodes are cut along samples that are strided in memory.

    Such nodes have the rules of images, and none of them has windows.
    """
    rules = [node.traits.strips for node in graph.nodes]
    cut = [rule for rule in rules if rule is not None]
    whole = all(node.traits.batch is None for node in graph.nodes)
    return whole and bool(cut) and all(rule.reach is None for rule in cut)


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
        split_rule(graph.tensors, node, batch) is None
        for node in graph.nodes
        if node.name in splittable
    )
    large = largest_rows(graph)
    unsplit = (n for n in graph.nodes if n.name not in splittable and n.inputs)
    return coupled or any(
        graph.tensors[name].nbytes >= large for node in unsplit for name in node.tensors
    )


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step that may be split, with the functions to complete, cost and plan it.

    Attributes:
        graph: A training graph without updates, before in-place rewriting.
        complete: Function that completes a graph by updates and order.
        costs: Function that profiles a step; None if it cannot be measured.
        request: Function that makes the planning request of a step and its profile.
    """

    graph: Graph = field(repr=False)
    complete: Callable[[Graph], Graph] = field(repr=False)
    costs: Callable[[Graph], Profile | None] = field(repr=False)
    request: Callable[[Graph, Profile], StepRequest] = field(repr=False)

    def within(self, budget: float) -> "SplitStep":
        """Return the step as it is planned within a budget of bytes."""
        return replace(
            self, request=lambda graph, costs: self.request(graph, costs).within(budget)
        )

    def in_parts(self, parts: int | Cutting) -> Graph:
        """Return the complete step, split into parts; 1 for the whole step."""
        cutting = Cutting(parts) if isinstance(parts, int) else parts
        return self.complete(cutting.cut(self.graph))


@dataclass(frozen=True, slots=True)
class SplitCandidate:
    """A candidate split of a step.

    Attributes:
        cutting: The way the step is split.
        request: Its planning request; None if it could not be measured.
        plan: Plan within the budget; None if infeasible or not planned.
        unbounded_ms: Time of a step without a budget.
        least_bytes: Minimum feasible budget; None if it could not be measured, or if
            the step is slower however planned.
        segments: Runs of nodes that are split.
        kept_whole: Message on unsplit operations; empty if all are split.
    """

    cutting: Cutting
    request: StepRequest | None = field(repr=False)
    plan: StepPlan | None = field(repr=False)
    unbounded_ms: float = math.inf
    least_bytes: int | None = None
    segments: tuple[Segment, ...] = ()
    kept_whole: str = ""

    @property
    def parts(self) -> int:
        """Number of parts of the largest layers; 1 for the whole step."""
        return self.cutting.parts

    @property
    def step_ms(self) -> float:
        """Predicted time of a step within the budget; infinity without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_ms
