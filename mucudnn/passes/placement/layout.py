"""Places for a schedule: a storage may be swapped in at another place than before.

What is live across iterations has one place at both ends of the step; these places come
first, at the bottom, and everything else around them.

Time is counted in instructions. A residency interval lasts from `Alloc` to `Free` and
has one offset; a workspace lasts as long as its `Compute`. On the host a storage has
bytes from its first `SwapOut` until the copy back that is its last has been waited for:
then whoever gets them next need not wait for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Role
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.ir.sizes import format_bytes
from mucudnn.notebook import drawn
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.placement.heuristics import Block, in_gaps
from mucudnn.passes.placement.packing import live_peak, pack
from mucudnn.passes.placement.page_table import PageTable
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "Layout",
    "PlacedStep",
    "host_blocks",
    "in_tiers",
    "interval_name",
    "lay_out",
    "lives_of",
    "workspace_name",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything that is not on the device all the time lies in one arena.

    Attributes:
        offsets: Storage -> the offsets of its residency intervals, in order.
        workspace_offsets: Node with a workspace -> offset of it.
        nbytes: Size of the arena.
        live_peak: The most bytes in use at once: a bound below `nbytes`.
        pages: The memory behind the addresses, where some of what is in it has no
            place in one piece; offsets are addresses then. Without one they are places.
    """

    offsets: Mapping[str, tuple[int, ...]]
    workspace_offsets: Mapping[str, int]
    nbytes: int
    live_peak: int
    pages: PageTable | None = None

    @property
    def mapped_chunks(self) -> int:
        """How many chunks of addresses have memory mapped behind them."""
        return 0 if self.pages is None else len(self.pages.chunks)

    @property
    def address_bytes(self) -> int:
        """Bytes of all addresses: of the arena itself where nothing is in pieces."""
        return self.nbytes if self.pages is None else self.pages.address_bytes

    @property
    def fragmentation(self) -> float:
        """Share of `live_peak` that the arena is larger than it."""
        return self.nbytes / self.live_peak - 1 if self.live_peak else 0.0


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A planned step, and where everything is.

    Attributes:
        plan: What was decided.
        layout: Offsets in an arena.
    """

    plan: StepPlan
    layout: Layout

    def __repr__(self) -> str:
        """Such as `PlacedStep(2.0 GiB: StepPlan(…))`."""
        return f"PlacedStep({format_bytes(self.nbytes)}: {self.plan!r})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("placed_step", self)

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        return self.plan.schedule

    @property
    def plans(self) -> Mapping[str, ConvPlan]:
        """Convolution node -> how to run it."""
        return self.plan.plans

    @property
    def state_bytes(self) -> int:
        """Parameters and state that never leave, beside the arena."""
        return self.plan.state_bytes

    @property
    def map_ms(self) -> float:
        """What it takes to map its memory, once, before the first step."""
        pages, chunks = self.layout.pages, self.plan.profile.chunks
        return pages.map_ms(chunks) if pages and chunks else 0.0

    @property
    def nbytes(self) -> int:
        """Device memory of the step, all of it."""
        return self.layout.nbytes + self.state_bytes


def lay_out(schedule: Schedule, *, alignment: int = ALIGNMENT) -> Layout:
    """Offsets such that what is needed at the same time does not overlap.

    Persistent tensors are not part of it unless they are host-resident.

    Args:
        schedule: What runs.
        alignment: Of every offset, in bytes.
    """
    lives = lives_of(schedule)
    blocks = []
    fixed: dict[str, int] = {}
    bottom = 0
    for name in schedule.live_across:
        for i in (0, len(lives[name]) - 1):
            fixed[interval_name(name, i)] = bottom
        bottom += rounded(schedule.graph.tensors[name].nbytes, alignment)
    for name, of_name in lives.items():
        nbytes = rounded(schedule.graph.tensors[name].nbytes, alignment)
        blocks += [
            Block(interval_name(name, i), nbytes, first, last)
            for i, (first, last) in enumerate(of_name)
        ]
    scratch = []
    for at, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute):
            nbytes = rounded(schedule.workspaces.get(instruction.node, 0), alignment)
            if nbytes:
                scratch.append(instruction.node)
                blocks.append(Block(workspace_name(instruction.node), nbytes, at, at))
    packing = pack(blocks, fixed=fixed)
    found = packing.offsets
    offsets = {
        name: tuple(found[interval_name(name, i)] for i in range(len(of_name)))
        for name, of_name in lives.items()
    }
    return Layout(
        MappingProxyType(offsets),
        MappingProxyType({node: found[workspace_name(node)] for node in scratch}),
        packing.nbytes,
        live_peak(blocks),
    )


def host_blocks(schedule: Schedule) -> tuple[Block, ...]:
    """What the host holds and when, in order of first use.

    But for what is host-resident: that has bytes of its own.
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
    """Places for blocks in the first of several memories that has room.

    Args:
        blocks: What is to be placed; the first come first.
        capacities: Bytes of each memory, the preferred one first.
        beyond: Block -> the first memory that it may go to, if that is not the first.

    Returns:
        Block -> (which memory, offset), and the blocks that fit nowhere.
    """
    found: dict[str, tuple[int, int]] = {}
    first = beyond or {}
    left = tuple(blocks)
    for tier, capacity in enumerate(capacities):
        able = [block for block in left if first.get(block.name, 0) <= tier]
        packing = pack(able)
        if packing.nbytes <= capacity:
            offsets = [packing.offsets[block.name] for block in able]
        else:
            offsets = in_gaps(able, range(len(able)), capacity)
        placed = zip(able, offsets, strict=True)
        found.update((b.name, (tier, offset)) for b, offset in placed if offset >= 0)
        left = tuple(block for block in left if block.name not in found)
    return found, left


def lives_of(schedule: Schedule) -> dict[str, list[tuple[int, int]]]:
    """Storage -> the first and last instruction of each of its residency intervals.

    An input is there before the first instruction, a result until after the last, and
    what is live across iterations both. What is touched and never allocated is there
    all the time.
    """
    graph, end = schedule.graph, len(schedule.instructions)
    found = {name: [(-1, end)] for name in schedule.live_across}
    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case Alloc(name):
                found.setdefault(name, []).append((at, end))
            case Free(name):
                found[name][-1] = (found[name][-1][0], at)
    for name in _touched(schedule):
        found.setdefault(name, [(-1, end)])
    for spec in graph.with_role(Role.INPUT):
        found[spec.name][0] = (-1, found[spec.name][0][1])
    for output in graph.outputs:
        if (name := graph.storages[output]) in found:
            found[name][-1] = (found[name][-1][0], end)
    return found


def _touched(schedule: Schedule) -> list[str]:
    """Storages that a step reads, writes or returns, but for parameters and state."""
    graph = schedule.graph
    inputs = (spec.name for spec in graph.with_role(Role.INPUT))
    used = (name for node in graph.nodes for name in node.tensors)
    storages = (graph.storages[name] for name in (*inputs, *used, *graph.outputs))
    elsewhere = {spec.name for spec in graph.with_role(*PERSISTENT)}
    return [name for name in dict.fromkeys(storages) if name not in elsewhere]


def interval_name(storage: str, number: int) -> str:
    """A name for one residency interval among others of its storage."""
    return f"{storage}\0{number}"


def workspace_name(node: str) -> str:
    """A name for the workspace of a node."""
    return f"\0{node}"
