"""Turn a graph into the plainest schedule: everything stays until its last use."""

import itertools
from collections import defaultdict
from collections.abc import Mapping

from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.schedule import Alloc, Compute, Free, Instruction, Schedule
from mucudnn.passes.liveness import live_ranges, rounded


def keep_all(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Schedule:
    """Allocate each storage before its first use and free it after its last.

    Persistent tensors are allocated outside of a step, but count in the peak. What
    lives to the end (see `liveness.kept`) is not freed: the caller takes it out.

    Args:
        graph: What is run.
        workspaces: Node -> bytes of scratch memory while it runs.
    """
    begins: defaultdict[int, list[Instruction]] = defaultdict(list)
    ends: defaultdict[int, list[Instruction]] = defaultdict(list)
    for name, live in live_ranges(graph).items():
        if graph.tensors[name].role not in PERSISTENT:
            begins[live.first].append(Alloc(name))
            ends[live.last].append(Free(name))
    instructions = list(begins.pop(0, ()))
    for position, node in enumerate(graph.nodes):
        instructions += begins[position]
        instructions.append(Compute(node.name))
        instructions += ends[position]
    return Schedule(
        graph,
        tuple(instructions),
        dict(workspaces or {}),
        peak_bytes(graph, workspaces),
    )


def memory_curve(
    graph: Graph, workspaces: Mapping[str, int] | None = None, *, granularity: int = 1
) -> tuple[int, ...]:
    """Return the bytes in use at each node, freeing storages after their last use."""
    workspaces = workspaces or {}
    end = len(graph.nodes)
    change = [0] * (end + 1)
    for storage, live in live_ranges(graph).items():
        nbytes = rounded(graph.tensors[storage].nbytes, granularity)
        change[live.first] += nbytes
        if live.last < end:
            change[live.last + 1] -= nbytes
    return tuple(
        used + rounded(workspaces.get(node.name, 0), granularity)
        for used, node in zip(itertools.accumulate(change), graph.nodes, strict=False)
    )


def peak_bytes(
    graph: Graph, workspaces: Mapping[str, int] | None = None, *, granularity: int = 1
) -> int:
    """Return the peak memory in bytes; without nodes, that of resident tensors."""
    always = (rounded(graph.tensors[s].nbytes, granularity) for s in live_ranges(graph))
    curve = memory_curve(graph, workspaces, granularity=granularity)
    return max(curve) if curve else sum(always)
