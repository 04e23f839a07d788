"""A profile out of published figures: every node at its roofline.

A node takes as long as its arithmetic or its memory traffic, whichever is longer (the
roofline of Williams et al. 2009), and a launch. Convolutions have up to three
algorithms: without workspace, with patches laid out for a matrix product, and
Winograd's with 2 x 2 outputs a tile. The more they need the faster they are, so that
the trade between workspace and time is there, at the price of real shapes and sizes. On
tensor cores those whose channels come first also take the time that turning their
images does, to channels last and back.
"""

import math
from collections.abc import Iterator, Mapping

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.devices import ASSUMED, DEVICES, Assumed, DeviceFigures, get_device
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches, pareto_plans

__all__ = ["conv_table", "estimate"]

_NO_LIMIT = 1 << 62
_TILE = 2
"""Outputs a side of a Winograd tile; its input is two wider for 3 x 3 filters."""


def estimate(
    graph: Graph,
    device: str | DeviceFigures,
    *,
    fronts: Mapping[ConvProblem, tuple[ConvPlan, ...]] | None = None,
    workspaces: Mapping[str, int] | None = None,
    batch_policy: BatchPolicy = "powers_of_two",
    assumed: Assumed = ASSUMED,
) -> Profile:
    """Estimate what a graph costs on a device.

    Args:
        graph: Of a step, in types that the device's figures are for.
        device: A name in `DEVICES`, or figures.
        fronts: Convolution -> plans from measurements; they replace the estimates.
        workspaces: Node -> bytes of scratch memory, of nodes that are no convolutions.
        batch_policy: Micro-batch sizes of convolutions.
        assumed: Shares of peaks.

    Raises:
        ValueError: The device is not known, or its figures are not for a
            convolution's type.
    """
    figures = get_device(device) if isinstance(device, str) else device
    known = dict(fronts or {})
    node_ms: dict[str, float] = {}
    once_more_ms: dict[str, float] = {}
    of_node: dict[str, tuple[ConvPlan, ...]] = {}
    for node in graph.nodes:
        if node.op == "conv":
            problem = node.attrs["problem"]
            if problem not in known:
                table = conv_table(problem, figures, batch_policy, assumed)
                known[problem] = tuple(pareto_plans(table, _NO_LIMIT))
            of_node[node.name] = known[problem]
            node_ms[node.name] = min(plan.time_ms for plan in known[problem])
        else:
            node_ms[node.name] = _node_ms(graph, node, figures, assumed)
        if (again := node.once_more) is not None:
            once_more_ms[node.name] = _node_ms(graph, again, figures, assumed)
    return Profile(
        node_ms=node_ms,
        workspaces=_temporaries(graph) | dict(workspaces or {}),
        fronts=of_node,
        out_bytes_per_ms=figures.out.value / 1e3,
        in_bytes_per_ms=figures.back.value / 1e3,
        chunks=assumed.chunks,
        once_more_ms=once_more_ms,
    )


def _temporaries(graph: Graph) -> dict[str, int]:
    return {
        node.name: node.traits.temporaries
        for node in graph.nodes
        if node.traits.temporaries
    }


def conv_table(
    problem: ConvProblem,
    figures: DeviceFigures,
    batch_policy: BatchPolicy = "powers_of_two",
    assumed: Assumed = ASSUMED,
) -> PerfTable:
    """Estimates of every algorithm at every micro-batch size.

    Raises:
        ValueError: The figures are not for the problem's type.
    """
    if problem.dtype not in figures.dtypes:
        known = ", ".join(n for n, d in DEVICES.items() if problem.dtype in d.dtypes)
        raise ValueError(
            f"a convolution is in {problem.dtype}; the figures of {figures.title} are "
            f"for {', '.join(figures.dtypes)}; for {problem.dtype} there are those of: "
            f"{known or 'no device'}"
        )
    rows = tuple(
        row
        for batch in candidate_batches(problem.batch, batch_policy)
        for row in _algorithms(problem.with_batch(batch), figures, assumed)
    )
    return PerfTable(problem, rows)


def _algorithms(
    problem: ConvProblem, figures: DeviceFigures, assumed: Assumed
) -> Iterator[AlgoPerf]:
    traffic = sum(operand.nbytes for operand in problem.operands())
    turned_ms = _turned_ms(problem, figures, assumed)

    def row(algo: str, flops: float, share: float, workspace: int) -> AlgoPerf:
        # What is laid out in the workspace is written once and read once.
        nbytes = traffic + 2 * workspace
        ms = _roofline(flops, share, nbytes, figures, assumed) + turned_ms
        return AlgoPerf(algo=algo, batch=problem.batch, time_ms=ms, workspace=workspace)

    if math.prod(problem.w_shape[2:]) == 1:
        yield row("IMPLICIT_GEMM", problem.flops, assumed.matmul, 0)
        return
    yield row("IMPLICIT_GEMM", problem.flops, assumed.direct, 0)
    yield row("GEMM", problem.flops, assumed.matmul, _patch_bytes(problem))
    if _winograd_suits(problem):
        gain = (3 * _TILE) ** 2 / (_TILE + 2) ** 2
        workspace = _tile_bytes(problem)
        yield row("WINOGRAD", problem.flops / gain, assumed.matmul, workspace)


def _turned_ms(problem: ConvProblem, figures: DeviceFigures, assumed: Assumed) -> float:
    """What turning its images takes, by copies before and behind the products."""
    if not figures.turns or problem.layout == "NHWC":
        return 0.0
    elements = math.prod(problem.x_shape) + math.prod(problem.y_shape)
    nbytes = 2 * elements * problem.itemsize
    return 1e3 * nbytes / (figures.bandwidth.value * assumed.memory)


def _patch_bytes(problem: ConvProblem) -> int:
    """Bytes of a matrix with a row of inputs for every output position."""
    n, _, *positions = problem.y_shape
    patch = problem.groups * math.prod(problem.w_shape[1:])
    return n * math.prod(positions) * patch * problem.itemsize


def _winograd_suits(problem: ConvProblem) -> bool:
    return (
        problem.w_shape[2:] == (3, 3)
        and set(problem.stride) == {1}
        and set(problem.dilation) == {1}
        and problem.groups == 1
    )


def _tile_bytes(problem: ConvProblem) -> int:
    """Bytes of transformed inputs, outputs and filters."""
    n, k, *positions = problem.y_shape
    c = problem.x_shape[1]
    tiles = math.prod(-(-size // _TILE) for size in positions)
    points = (_TILE + 2) ** 2
    return points * (n * tiles * (c + k) + c * k) * problem.itemsize


def _node_ms(
    graph: Graph, node: Node, figures: DeviceFigures, assumed: Assumed
) -> float:
    if node.traits.view:
        return 0.0
    again = (node.inputs[index] for index in node.traits.rereads)
    touched = (*node.tensors, *node.mutates, *again)
    nbytes = sum(graph.tensors[name].nbytes for name in touched)
    if "parts" in node.attrs:  # some rows of what it reads, which it writes
        nbytes = 2 * sum(graph.tensors[name].nbytes for name in node.outputs)
    flops = _matmul_flops(graph, node) if node.op == "matmul" else 0.0
    return _roofline(flops, assumed.matmul, nbytes, figures, assumed)


def _matmul_flops(graph: Graph, node: Node) -> float:
    """Twice M N K, for (M, K) x (K, N): the root of the product of all three sizes."""
    a, b, out = (math.prod(graph.tensors[name].shape) for name in node.tensors)
    return 2.0 * math.sqrt(a * b * out)


def _roofline(
    flops: float,
    share: float,
    nbytes: int,
    figures: DeviceFigures,
    assumed: Assumed,
) -> float:
    arithmetic = flops / (figures.flops.value * share)
    traffic = nbytes / (figures.bandwidth.value * assumed.memory)
    return 1e3 * max(arithmetic, traffic) + assumed.launch_ms
