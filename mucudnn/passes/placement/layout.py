"""Layouts: an offset for every residency interval, and page tables.

A storage may be prefetched to another offset than before. Tensors that are live across
steps have the same offset at both ends of the step; they are placed first, at the
bottom, and everything else around them.

Time is counted in instructions. A residency interval lasts from `Alloc` to `Free`, a
workspace as long as its `Compute`. Host memory of a storage is in use from its first
`SwapOut` until its last copy back has been awaited, so that its next owner need not
wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT
from mucudnn.ir.profile import ChunkCosts
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import Role
from mucudnn.notebook import html_of
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.packing import Block, in_gaps, live_peak, pack
from mucudnn.passes.scheduling.step_plan import StepPlan


class Extent(NamedTuple):
    """A contiguous range of bytes from `start` to `stop` (exclusive)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Memory chunk behind each chunk of addresses.

    Attributes:
        chunk_bytes: Size of a chunk.
        chunks: Numbers of memory chunks, in the order of addresses.
    """

    chunk_bytes: int
    chunks: tuple[int, ...]

    def map_ms(self, costs: ChunkCosts) -> float:
        """Return the time to map all chunks."""
        return len(self.chunks) * costs.map_ms

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        """Return the memory extents behind a range of addresses, in order."""
        size = self.chunk_bytes
        moves = (
            (at, (self.chunks[at] - at) * size)
            for at in range(start // size, -(-stop // size))
        )
        return joined(
            Extent(max(start, at * size) + move, min(stop, (at + 1) * size) + move)
            for at, move in moves
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in one arena of everything that is not always resident.

    Attributes:
        offsets: Offsets of the residency intervals of each storage, in order.
        workspace_offsets: Offset of the workspace of each node that has one.
        nbytes: Size of the arena.
        live_peak: Peak of bytes in use, a lower bound of `nbytes`.
        pages: Page table if some tensors are not contiguous in memory; offsets are
            virtual addresses then.
    """

    offsets: Mapping[str, tuple[int, ...]]
    workspace_offsets: Mapping[str, int]
    nbytes: int
    live_peak: int
    pages: PageTable | None = None

    @property
    def mapped_chunks(self) -> int:
        """Number of mapped chunks."""
        return 0 if self.pages is None else len(self.pages.chunks)

    @property
    def fragmentation(self) -> float:
        """Excess of the arena over `live_peak`, as a fraction of `live_peak`."""
        return self.nbytes / self.live_peak - 1 if self.live_peak else 0.0


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A planned step with an arena layout.

    Attributes:
        plan: The planned step.
        layout: Offsets in the arena.
    """

    plan: StepPlan
    layout: Layout

    def __repr__(self) -> str:
        """Return a summary such as `PlacedStep(2.0 GiB: StepPlan(…))`."""
        return f"PlacedStep({format_bytes(self.nbytes)}: {self.plan!r})"

    _repr_html_ = html_of

    @property
    def schedule(self) -> Schedule:
        """The schedule to run."""
        return self.plan.schedule

    @property
    def plans(self) -> Mapping[str, ConvPlan]:
        """Plan of each convolution node."""
        return self.plan.plans

    @property
    def state_bytes(self) -> int:
        """Bytes of resident parameters and state, not part of the arena."""
        return self.plan.state_bytes

    @property
    def map_ms(self) -> float:
        """Time to map the memory, once, before the first step."""
        pages, chunks = self.layout.pages, self.plan.profile.mapping_costs
        return pages.map_ms(chunks) if pages and chunks else 0.0

    @property
    def nbytes(self) -> int:
        """Total device memory of the step in bytes."""
        return self.layout.nbytes + self.state_bytes


def lay_out(schedule: Schedule) -> Layout:
    """Lay out everything in a schedule except resident parameters and state."""
    blocks, fixed = step_blocks(schedule)
    packing = pack(blocks, fixed=fixed)
    return layout_at(schedule, packing.offsets, packing.nbytes, live_peak(blocks))


def step_blocks(schedule: Schedule) -> tuple[list[Block], dict[str, int]]:
    """Return residency intervals and workspaces, and the offsets of fixed ones.

    State that is live across steps is at the same place at both ends of the step, at
    the bottom.
    """
    blocks: list[Block] = []
    fixed: dict[str, int] = {}
    bottom = 0
    for name, lives in lives_of(schedule).items():
        nbytes = rounded(schedule.graph.tensors[name].nbytes)
        names = [interval_name(name, i) for i in range(len(lives))]
        pairs = zip(names, lives, strict=True)
        blocks += (Block(own, nbytes, first, last) for own, (first, last) in pairs)
        if name in schedule.live_across:
            fixed[names[0]] = fixed[names[-1]] = bottom
            bottom += nbytes
    # A workspace lives during its node only.
    for at, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute):
            nbytes = rounded(schedule.workspaces.get(instruction.node, 0))
            if nbytes:
                blocks.append(Block(workspace_name(instruction.node), nbytes, at, at))
    return blocks, fixed


def layout_at(
    schedule: Schedule,
    offsets: Mapping[str, int],
    nbytes: int,
    peak_bytes: int,
    pages: PageTable | None = None,
) -> Layout:
    """Return the layout of a schedule with the offsets of its `step_blocks`."""
    intervals = {
        name: tuple(offsets[interval_name(name, i)] for i in range(len(lives)))
        for name, lives in lives_of(schedule).items()
    }
    names = {node: workspace_name(node) for node in schedule.workspaces}
    scratch = {node: offsets[own] for node, own in names.items() if own in offsets}
    return Layout(
        MappingProxyType(intervals),
        MappingProxyType(scratch),
        nbytes,
        peak_bytes,
        pages,
    )


def host_blocks(schedule: Schedule) -> tuple[Block, ...]:
    """Return the offloaded storages with their host live ranges, by first use.

    Host-resident tensors have memory of their own and are not included.
    """
    hosted = set(schedule.hosted)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    end = len(schedule.instructions)
    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case SwapOut(name) | SwapIn(name) if name not in hosted:
                first.setdefault(name, at)
                last[name] = end
            case Wait(name):
                last[name] = min(last.get(name, end), at)
    return tuple(
        Block(name, rounded(schedule.graph.tensors[name].nbytes), at, last[name])
        for name, at in first.items()
    )


def in_tiers(
    blocks: Sequence[Block],
    capacities: Sequence[float],
    beyond: Mapping[str, int] | None = None,
) -> tuple[dict[str, tuple[int, int]], tuple[Block, ...]]:
    """Place each block, by priority, in the first memory tier that has room.

    Blocks in `beyond` may only use the tiers from the given one on.

    Returns:
        (tier, offset) of each placed block, and the blocks that fit nowhere.
    """
    found: dict[str, tuple[int, int]] = {}
    first = beyond or {}
    left = tuple(blocks)
    for tier, capacity in enumerate(capacities):
        candidates = [block for block in left if first.get(block.name, 0) <= tier]
        packing = pack(candidates)
        # If not everything fits, place in the order of priority what does.
        if packing.nbytes <= capacity:
            offsets = [packing.offsets[block.name] for block in candidates]
        else:
            offsets = in_gaps(candidates, range(len(candidates)), capacity)
        placed = zip(candidates, offsets, strict=True)
        found.update((b.name, (tier, offset)) for b, offset in placed if offset >= 0)
        left = tuple(block for block in left if block.name not in found)
    return found, left


def lives_of(schedule: Schedule) -> dict[str, list[tuple[int, int]]]:
    """Return (first, last) instruction of every residency interval of each storage.

    Inputs are resident before the first instruction (-1), results after the last one,
    and tensors live across steps both. Storages that are used but never allocated are
    resident all the time.
    """
    graph, end = schedule.graph, len(schedule.instructions)
    found = {name: [(-1, end)] for name in schedule.live_across}
    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case Alloc(name):
                found.setdefault(name, []).append((at, end))
            case Free(name):
                found[name][-1] = (found[name][-1][0], at)
    # What the step uses or returns, without parameters and state.
    inputs = (spec.name for spec in graph.with_role(Role.INPUT))
    used = (name for node in graph.nodes for name in node.tensors)
    elsewhere = {spec.name for spec in graph.with_role(*PERSISTENT)}
    touched = (graph.storages[t] for t in (*inputs, *used, *graph.outputs))
    for name in dict.fromkeys(touched):
        if name not in elsewhere:
            found.setdefault(name, [(-1, end)])
    for spec in graph.with_role(Role.INPUT):
        found[spec.name][0] = (-1, found[spec.name][0][1])
    for output in graph.outputs:
        if (name := graph.storages[output]) in found:
            found[name][-1] = (found[name][-1][0], end)
    return found


def interval_name(storage: str, number: int) -> str:
    """Return the block name of a storage's residency interval."""
    return f"{storage}\0{number}"


def workspace_name(node: str) -> str:
    """Return the block name of a node's workspace."""
    return f"\0{node}"


# Page table of virtual addresses that make scattered tensors contiguous.
#
# Device memory consists of chunks, and a chunk may be mapped at several addresses at
# once. All mappings of a step are made before its first run. A tensor in several pieces
# has a contiguous address range of its own, which is valid in every step. A tensor in
# one piece needs none: the first addresses map the memory itself, chunk by chunk.


def joined(pieces: Iterable[Extent]) -> tuple[Extent, ...]:
    """Merge adjacent extents of a sequence."""
    found: list[Extent] = []
    for start, stop in pieces:
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Extent(start, stop))
    return tuple(found)


def with_addresses(
    places: Mapping[str, Sequence[Extent]], chunk_bytes: int
) -> tuple[dict[str, int], PageTable | None]:
    """Assign contiguous addresses to scattered tensors.

    Returns:
        First address of each tensor, and the page table: None if all tensors are
        contiguous, so that addresses are offsets.
    """
    ends = (pieces[-1].stop for pieces in places.values())
    scattered = {name: p for name, p in places.items() if len(p) > 1}
    offsets = {name: pieces[0].start for name, pieces in places.items()}
    if not scattered:
        return offsets, None
    # The page table begins with all chunks in place; scattered tensors follow them.
    tops = (piece.stop for pieces in scattered.values() for piece in pieces)
    table = list(range(-(-max(*ends, *tops) // chunk_bytes)))
    known: dict[tuple[int, ...], int] = {}
    for name, pieces in scattered.items():
        chunks = tuple(
            chunk
            for start, stop in pieces
            for chunk in range(start // chunk_bytes, -(-stop // chunk_bytes))
        )
        if chunks not in known:
            known[chunks] = len(table) * chunk_bytes
            table += chunks
        offsets[name] = known[chunks] + pieces[0].start % chunk_bytes
    return offsets, PageTable(chunk_bytes, tuple(table))
