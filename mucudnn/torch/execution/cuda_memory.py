"""What PyTorch's CUDA allocator holds beside the tensors of a plan.

A GPU runs out of reserved memory: of the segments that the allocator has of the driver.
A plan counts the bytes of tensors and of scratch memory. Three things come on top:

* Workspaces of cuBLAS stay allocated, one for each thread and stream that has computed
  a product. `library_bytes` measures them; plans count them as a part of the budget.
* Blocks that measuring has left. `reserve` gives them back to the driver.
* Free blocks that are too small for the next tensor, so that the allocator asks the
  driver for another segment. `reserve` reserves the segments that `best_segments` finds
  for the order of the step's allocations, which the tensors of a step are then cut
  from. All allocations are made in them once, without kernels, which tells how much
  more is needed.
* Free parts of segments in which the model's own tensors are. They cannot be given
  back, so `reserve` counts them.

This costs nothing in a step, and other code may use the blocks between two steps, which
a `torch.cuda.MemPool` of the plan's own would prevent. A pool in which one block was
reserved leaves the same gaps, as its allocator is the same: this was measured for four
plans each of GPT-2 and ResNet-50. One with `no_split` reserves at least twice as much.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from traceback import walk_tb
from typing import Any, TypeVar

import torch

from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.scheduling.problem import origin
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.execution.segments import best_segments
from mucudnn.torch.lowering.lowered import Lowered

ResultT = TypeVar("ResultT")

_CURRENT = "requested_bytes.all.current"
_PRODUCTS = ("mm", "bmm", "linear", "matmul", "convolution")
"""Ends of the names of operations that compute in cuBLAS's workspace."""

_ACCEPTED = 0.005
"""Part of a step's bytes that gaps may take before other segments are tried."""

_UNPLANNED = 4 << 20
"""Two segments of the allocator's for tensors up to 1 MiB: a step has some that its
plan does not list, such as the scalars of an update."""

_REHEARSALS = 5
"""Steps after which the allocator has what it needs."""

_SHOWN = 8
PROGRAM = "<planned step>"
"""File name in the traceback of a planned program."""


def library_bytes(lowered: Lowered, device: torch.device, threads: int) -> int:
    """Return the bytes of the workspaces that products in a step's threads keep.

    Of two threads the other one is autograd's. All workspaces are allocated here, so
    that no run does it.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    names = {node.op.split(".")[-2] for node in lowered.graph.nodes if "." in node.op}
    if not any(name.endswith(_PRODUCTS) for name in names):
        return 0
    # cuBLAS makes a workspace at the first product of a thread: run one in each.
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(8, 8, device=device, requires_grad=threads > 1)
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_stats(device).get(_CURRENT, 0)
        made = [one @ one, torch.addmm(one[0], one, one)]
        if threads > 1:
            made += torch.autograd.grad(made, one, [torch.ones_like(t) for t in made])
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

    More segments are tried until they fit into the `allowed` bytes beyond `nbytes`, the
    most that tensors and scratch memory of the step take. `pieces` are those of
    `allocations_of_nodes`.

    Returns:
        Bytes that the allocator has to reserve beyond these.

    Raises:
        torch.OutOfMemoryError: The device does not have them.
    """
    device = device_of(lowered.layouts)
    before = _reserve_blocks(device, ())
    held = before - int(torch.cuda.memory_stats(device).get(_CURRENT, 0)) + _UNPLANNED
    allocations, holes = _allocations(lowered, schedule, pieces), _holes(device)
    enough = _ACCEPTED * nbytes - sum(holes)
    if allowed >= held:  # else no segments are enough
        enough = min(enough, allowed - held)
    segments = best_segments(allocations, nbytes, holes, enough)
    gaps = _gaps(device, allocations, [*holes, *segments], nbytes)
    torch.cuda.reset_peak_memory_stats(device)
    return max(0, gaps + held)


def watching_reserved(
    device: torch.device, report: Callable[[int], None]
) -> Callable[[Callable[[list[Any]], ResultT]], Callable[[list[Any]], ResultT]]:
    """Return a decorator that reports what first runs reserve beyond a rehearsal.

    Nothing is expected: the rehearsal has reserved what the program needs. `report` is
    called with all bytes so far when a run has reserved more.
    """
    nbytes = 0

    def watched(run: Callable[[list[Any]], ResultT]) -> Callable[[list[Any]], ResultT]:
        left = _REHEARSALS

        def watched_run(given: list[Any]) -> ResultT:
            nonlocal left, nbytes
            if not left:
                return run(given)
            left -= 1
            before = torch.cuda.memory_reserved(device)
            result = run(given)
            if (more := torch.cuda.memory_reserved(device) - before) > 0:
                nbytes += more
                report(nbytes)
            return result

        return watched_run

    return watched


def reserve_block(device: torch.device, nbytes: int) -> None:
    """Have many tensors that are allocated next cut from one block, if there is room.

    The allocator's segments for tensors below 10 MiB have 20 MiB, and the rest of one
    may be too small for the next tensor.
    """
    with suppress(torch.OutOfMemoryError):
        torch.empty(nbytes, dtype=torch.uint8, device=device)


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


def _holes(device: torch.device) -> list[int]:
    """Return the free blocks above 1 MiB that the next tensors may be cut from."""
    stream = torch.cuda.current_stream(device).cuda_stream
    found = [
        int(block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0)
        and (segment["stream"], segment["segment_type"]) == (stream, "large")
        and segment["segment_pool_id"] == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return sorted(found, reverse=True)


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
    found: list[tuple[str, int]] = []
    pending: dict[str, int] = {}  # a program allocates where it computes or fetches
    for step in schedule.instructions:
        match step:
            case Alloc(name) if name in on_cuda:
                pending[name] = graph.tensors[name].nbytes
            case SwapIn(name) if name in pending:
                found.append((name, pending.pop(name)))
            case Free(name) if name in on_cuda:
                found.append((name, 0))
            case Compute(node):
                outputs = {origin(t): t for t in graph.by_name[node].outputs}
                first = lowered.graph.by_name[origin(node)].outputs
                nbytes = schedule.workspaces.get(node, 0)
                one_piece = [(-1, nbytes), (-1, 0)] if nbytes else []
                for number, size in pieces.get(origin(node)) or one_piece:
                    name = outputs.get(first[number], "") if number >= 0 else ""
                    if number < 0:
                        found.append((f"scratch {number} of {node}", size))
                    elif name in pending:
                        found.append((name, pending.pop(name)))
                found += pending.items()
                pending.clear()
    return found


def reserved_line(device: torch.device) -> str:
    """Return a line with the most that the allocator was asked for and reserved."""
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
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename != PROGRAM:
            continue
        for name, value in frame.f_locals.items():
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
