"""What PyTorch's CUDA allocator holds beside the tensors of a plan.

A GPU runs out of reserved memory: of the segments that the allocator has of the driver.
A plan counts the bytes of tensors and of scratch memory. Three things come on top:

* Workspaces of cuBLAS stay allocated, one for each thread and stream that has computed
  a product. `library_bytes` measures one; plans count it as a part of the budget.
* Blocks that measuring has left. `reserve` gives them back to the driver.
* Free blocks that are too small for the next tensor, so that the allocator asks the
  driver for another segment. `reserve` allocates one block of the plan's size and frees
  it: the tensors of a step are then cut from one segment. All allocations of the step
  are made in it once, without its kernels, which tells how much more is needed. Where
  that is much, larger blocks are tried, and blocks of the largest tensors' sizes.
* Free parts of segments in which the model's own tensors are. They cannot be given
  back, so `reserve` counts them.

This costs nothing in a step, and other code may use the blocks between two steps, which
a `torch.cuda.MemPool` of the plan's own would prevent. A pool in which one block was
reserved leaves the same gaps, as its allocator is the same: this was measured for four
plans each of GPT-2 and ResNet-50. One with `no_split` reserves at least twice as much.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, product
from random import Random
from types import TracebackType
from typing import TypeVar

import torch

from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.scheduling.problem import origin
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.lowering.lowered import Lowered

ResultT = TypeVar("ResultT")

_CURRENT = "requested_bytes.all.current"
_PRODUCTS = ("mm", "bmm", "linear", "matmul", "convolution")
"""Ends of the names of operations that compute in cuBLAS's workspace."""

_ACCEPTED = 0.005
"""Part of a step's bytes that gaps may take before other blocks are tried."""

_UNPLANNED = 4 << 20
"""Two segments of the allocator's for tensors up to 1 MiB: a step has some that its
plan does not list, such as the scalars of an update."""

_LARGE = 0.02
"""Part of a step's bytes from which a tensor may have a block of its own."""

_SMALLEST = 10 << 20
"""Bytes from which a block is a segment of its own: smaller ones share 20 MiB."""

_MOST_PARTITIONS = 12

_SPARE = 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05
"""Parts of a step's bytes by which blocks are tried that are larger than the step."""

_DRAWN = 100
"""Partitions that are drawn at random where gaps are left by all others."""

_REHEARSALS = 5
"""Steps after which the allocator has what it needs."""

_SHOWN = 8
PROGRAM = "<planned step>"
"""File name in the traceback of a planned program."""


def library_bytes(lowered: Lowered, device: torch.device) -> int:
    """Return the bytes of the workspace that products in one thread and stream keep."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    names = {node.op.split(".")[-2] for node in lowered.graph.nodes if "." in node.op}
    if not any(name.endswith(_PRODUCTS) for name in names):
        return 0
    with torch.no_grad():
        one = torch.ones(8, 8, device=device)
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_stats(device).get(_CURRENT, 0)
        made = one @ one, torch.addmm(one[0], one, one)
        after = torch.cuda.memory_stats(device).get(_CURRENT, 0)
    return max(0, int(after - before - sum(tensor.nbytes for tensor in made)))


def reserve(
    lowered: Lowered,
    schedule: Schedule,
    nbytes: int,
    allowed: float,
    pieces: Mapping[str, Sequence[tuple[int, int]]],
) -> int:
    """Reserve the memory of a step, and find out how much it needs beyond its peak.

    Args:
        lowered: The step.
        schedule: Its instructions.
        nbytes: The most bytes of tensors and scratch memory that the step allocates.
        allowed: Bytes that may be reserved beyond these: more blocks are tried until
            they suffice.
        pieces: In which order nodes allocate, as `allocations_of_nodes` says.

    Returns:
        Bytes that the allocator has to reserve beyond these.

    Raises:
        torch.OutOfMemoryError: The device does not have them.
    """
    device = device_of(lowered.layouts)
    gc.collect()  # what is freed later leaves holes that a rehearsal does not see
    before = _reserve_blocks(device, ())
    held = before - int(torch.cuda.memory_stats(device).get(_CURRENT, 0)) + _UNPLANNED
    room, enough = allowed - held, _ACCEPTED * nbytes
    if room >= 0:  # else no blocks are enough
        enough = min(enough, room)
    allocations = _allocations(lowered, schedule, pieces)
    _, blocks = _best_blocks(device, allocations, nbytes, enough)
    # Which of two equal holes is filled depends on their addresses, which are new; so
    # what this rehearsal reserves is what the step uses.
    gaps = _gaps(device, allocations, blocks, nbytes)
    torch.cuda.reset_peak_memory_stats(device)
    return max(0, gaps + held)


class ReservedGrowth:
    """Bytes that CUDA's allocator reserves in the first runs of a rehearsed step.

    None are expected: the rehearsal has reserved what the step needs.

    Attributes:
        nbytes: The bytes so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._runs = 0

    def watched(self, run: Callable[[], ResultT], device: torch.device) -> ResultT:
        """Run the step on a device."""
        if self._runs >= _REHEARSALS:
            return run()
        self._runs += 1
        before = torch.cuda.memory_reserved(device)
        result = run()
        self.nbytes += max(0, torch.cuda.memory_reserved(device) - before)
        return result


def reserve_block(device: torch.device, nbytes: int) -> None:
    """Have many tensors that are allocated next cut from one block, if there is room.

    The allocator's segments for tensors below 10 MiB have 20 MiB, and the rest of one
    may be too small for the next tensor.
    """
    with suppress(torch.OutOfMemoryError):
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def _best_blocks(
    device: torch.device,
    allocations: Sequence[tuple[str, int]],
    nbytes: int,
    enough: float,
) -> tuple[int, list[int]]:
    """Return the fewest bytes in gaps that any blocks leave, and these blocks.

    The search ends with the first blocks that leave few `enough`.

    A little more memory often saves a whole tensor's: the allocator splits no block of
    which less than 1 MiB would be left. So every partition is tried with more and more
    bytes, until these are more than the gaps found. Then some are drawn at random.
    """
    best = 2 * nbytes, [nbytes]

    def attempt(blocks: list[int]) -> None:
        nonlocal best
        with suppress(torch.OutOfMemoryError):
            best = min(best, (_gaps(device, allocations, blocks, nbytes), blocks))

    most = _most_alive(allocations, nbytes)
    for share, (first, *others) in product(_SPARE, _partitions(most, nbytes)):
        if best[0] <= max(share * nbytes, enough):
            break
        attempt([first + int(share * nbytes), *others])
    draw = Random(0)
    for _ in range(_DRAWN if most else 0):
        if best[0] <= enough:
            break
        blocks = []
        for size in draw.sample([*most], min(len(most), draw.randint(1, 3))):
            blocks += [size] * draw.randint(1, most[size])
        rest = nbytes + int(draw.random() * best[0]) - sum(blocks)
        if rest > 0:
            attempt([rest, *blocks])
    return best


def _most_alive(
    allocations: Sequence[tuple[str, int]], nbytes: int
) -> Mapping[int, int]:
    """Return how many tensors of each large size are alive at once at most."""
    alive: dict[str, int] = {}
    count: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for name, size in allocations:
        if size >= max(nbytes * _LARGE, _SMALLEST):
            alive[name] = size
            count[size] += 1
            most[size] = max(most[size], count[size])
        elif name in alive and size == 0:
            count[alive.pop(name)] -= 1
    return most


def _partitions(most: Mapping[int, int], nbytes: int) -> Iterator[list[int]]:
    """Yield blocks that a step's bytes may be reserved in: one, then one and others.

    The others have the sizes of the largest tensors, as many as are alive at once.
    What is small is cut from the smallest block that holds it, so that the space of
    a large tensor stays whole until nothing else is left.
    """
    yield [nbytes]
    others = (
        [nbytes - number * size, *[size] * number]
        for size in sorted(most, reverse=True)
        for number in range(1, most[size] + 1)
        if number * size < nbytes
    )
    yield from islice(others, _MOST_PARTITIONS)


def _gaps(
    device: torch.device,
    allocations: Sequence[tuple[str, int]],
    blocks: Sequence[int],
    nbytes: int,
) -> int:
    """Return the bytes that are reserved beyond `nbytes` for a step's allocations.

    They are made again in what was reserved for them, as every step does, until that
    is enough.
    """
    before = _reserve_blocks(device, blocks)
    reserved = 0
    for _ in range(_REHEARSALS):
        live = {}
        for name, size in allocations:
            if size:
                live[name] = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                live.pop(name, None)
        live.clear()
        last, reserved = reserved, int(torch.cuda.memory_reserved(device))
        if last == reserved:
            break
    return reserved - before - nbytes


def _reserve_blocks(device: torch.device, blocks: Sequence[int]) -> int:
    """Reserve blocks of these bytes; return the bytes reserved before.

    What is unused goes back to the driver first.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in blocks]
    held.clear()
    return int(before)


def _allocations(
    lowered: Lowered,
    schedule: Schedule,
    pieces: Mapping[str, Sequence[tuple[int, int]]],
) -> list[tuple[str, int]]:
    """Return the allocations of a step on the device in order; 0 bytes frees one."""
    graph, kept = schedule.graph, set(schedule.resident)
    on_cuda = {
        name
        for name in graph.tensors
        if lowered.layouts[origin(name)].device.type == "cuda" and name not in kept
    }
    outputs = {node.name: node.outputs for node in graph.nodes}
    found: list[tuple[str, int]] = []
    for step in schedule.instructions:
        match step:
            case Alloc(name) if name in on_cuda:
                found.append((name, graph.tensors[name].nbytes))
            case Free(name) if name in on_cuda:
                found.append((name, 0))
            case Compute(node) if nbytes := schedule.workspaces.get(node, 0):
                # A kernel may allocate scratch memory before its results.
                results: list[tuple[str, int]] = []
                while found and found[-1][1] and found[-1][0] in outputs[node]:
                    results.append(found.pop())
                events = pieces.get(origin(node)) or [(0, nbytes), (0, 0)]
                freed = {number for number, size in events if not size}
                for number, size in events:
                    if number in freed:
                        found.append((f"scratch {number} of {node}", size))
                    elif same := [one for one in results if one[1] == size]:
                        found.append(same[-1])
                        results.remove(same[-1])
                found += reversed(results)
    return found


def reserved_line(device: torch.device) -> str:
    """Return what the allocator was asked for and has reserved at most, in words."""
    stats = torch.cuda.memory_stats(device)
    requested, reserved = (
        format_bytes(stats.get(f"{kind}_bytes.all.peak", 0))
        for kind in ("requested", "reserved")
    )
    return (
        f"the allocator of {device} was asked for {requested} and has reserved "
        f"{reserved} at most since the step was planned, the caller's tensors included"
    )


def live_tensors(error: BaseException) -> str:
    """Return the largest tensors of a planned program that was stopped by an error."""
    found: dict[int, str] = {}
    sizes: dict[int, int] = {}
    for frame in _frames(error.__traceback__):
        for name, value in frame.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                place = value.untyped_storage().data_ptr()
                sizes[place] = value.untyped_storage().nbytes()
                kind = str(value.dtype).removeprefix("torch.")
                found.setdefault(place, f"{name} {kind} {list(value.shape)}")
    largest = sorted(sizes, key=lambda place: -sizes[place])
    shown = [f"{found[p]} {format_bytes(sizes[p])}" for p in largest[:_SHOWN]]
    more = f" and {len(largest) - _SHOWN} more" if len(largest) > _SHOWN else ""
    total = format_bytes(sum(sizes.values()))
    return f"alive in the step were {total}: {', '.join(shown)}{more}"


def _frames(traceback: TracebackType | None) -> Iterator[dict[str, object]]:
    """Return the variables of planned programs on the stack of an error."""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == PROGRAM:
            yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next
