"""Estimate a profile from a device's published figures by the roofline model.

A node takes the longer of its arithmetic and its memory traffic (Williams et al. 2009),
and a launch. Convolutions have up to three algorithms: implicit GEMM without workspace,
GEMM over explicit patches, and Winograd with 2 x 2 outputs per tile. Faster algorithms
need more workspace, so the estimate has the trade-off that planners exploit. On tensor
cores, channels-first convolutions also pay for transposing their images to channels
last and back.
"""

import math
from collections.abc import Iterator, Mapping

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.devices import ASSUMED, DEVICES, DeviceFigures, get_device
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches, pareto_plans

_NO_LIMIT = 1 << 62
_TILE = 2
"""Outputs per side of a Winograd tile; its input is two larger for 3 x 3 filters."""


def estimate(
    graph: Graph,
    device: str | DeviceFigures,
    *,
    fronts: Mapping[ConvProblem, tuple[ConvPlan, ...]] | None = None,
    workspaces: Mapping[str, int] | None = None,
    batch_policy: BatchPolicy = "powers_of_two",
    tf32: bool = False,
) -> Profile:
    """Estimate the profile of a graph on a device.

    Args:
        graph: Graph of a step, in dtypes the device's figures cover.
        device: A name in `DEVICES`, or figures.
        fronts: Measured plans of convolutions, which replace the estimates.
        workspaces: Scratch bytes of nodes that are not convolutions.
        batch_policy: Micro-batch sizes of convolutions.
        tf32: Whether convolutions of float32 may use TF32 on tensor cores, as cuDNN's
            do by default.

    Raises:
        ValueError: The device is unknown, or its figures do not cover the dtype of a
            convolution.
    """
    figures = get_device(device) if isinstance(device, str) else device
    known = dict(fronts or {})
    node_ms: dict[str, float] = {}
    recompute_ms: dict[str, float] = {}
    of_node: dict[str, tuple[ConvPlan, ...]] = {}
    for node in graph.nodes:
        if node.op == "conv":
            problem = node.attrs["problem"]
            if problem not in known:
                table = conv_table(problem, figures, batch_policy, tf32)
                known[problem] = tuple(pareto_plans(table, _NO_LIMIT))
            of_node[node.name] = known[problem]
            # The fastest plan counts; slower ones of the front need less workspace.
            node_ms[node.name] = min(plan.time_ms for plan in known[problem])
        else:
            node_ms[node.name] = _node_ms(graph, node, figures)
        if (again := node.recompute_node) is not None:
            recompute_ms[node.name] = _node_ms(graph, again, figures)
    return Profile(
        node_ms=node_ms,
        workspaces={
            n.name: nbytes for n in graph.nodes if (nbytes := n.traits.temporaries)
        }
        | dict(workspaces or {}),
        fronts=of_node,
        out_bytes_per_ms=figures.d2h.value / 1e3,
        in_bytes_per_ms=figures.h2d.value / 1e3,
        mapping_costs=ASSUMED.chunks,
        recompute_ms=recompute_ms,
    )


def conv_table(
    problem: ConvProblem,
    figures: DeviceFigures,
    batch_policy: BatchPolicy = "powers_of_two",
    tf32: bool = False,
) -> PerfTable:
    """Estimate every algorithm at every micro-batch size.

    Raises:
        ValueError: The figures do not cover the convolution's dtype.
    """
    if not figures.rates(problem.dtype):
        known = ", ".join(n for n, d in DEVICES.items() if d.rates(problem.dtype))
        kinds = ", ".join(("float32", *figures.tensor_cores))
        raise ValueError(
            f"a convolution computes in {problem.dtype}, for which {figures.title} "
            f"has no figures, only for {kinds}; devices that have them: "
            f"{known or 'none'}"
        )
    rows = tuple(
        row
        for batch in candidate_batches(problem.batch, batch_policy)
        for row in _algorithms(problem.with_batch(batch), figures, tf32)
    )
    return PerfTable(problem, rows)


def _algorithms(
    problem: ConvProblem, figures: DeviceFigures, tf32: bool
) -> Iterator[AlgoPerf]:
    traffic = sum(operand.nbytes for operand in problem.operands())
    rates = figures.rates(problem.dtype, tf32=tf32)
    transpose_ms = _transpose_ms(problem, figures)

    def row(algo: str, flops: float, share: float, workspace: int) -> AlgoPerf:
        # The workspace is written once and read once.
        nbytes = traffic + 2 * workspace
        # Of float32, the faster of TF32 with transposed images and single precision.
        ms = min(
            _roofline(flops, rate * share, nbytes, figures)
            + (transpose_ms if tensor_cores else 0.0)
            for tensor_cores, rate in rates.items()
        )
        return AlgoPerf(algo=algo, batch=problem.batch, time_ms=ms, workspace=workspace)

    if math.prod(problem.w_shape[2:]) == 1:
        yield row("IMPLICIT_GEMM", problem.flops, ASSUMED.matmul, 0)
        return
    yield row("IMPLICIT_GEMM", problem.flops, ASSUMED.direct, 0)
    # A matrix with a row of inputs per output position.
    n, _, *positions = problem.y_shape
    patch = problem.groups * math.prod(problem.w_shape[1:])
    patches = n * math.prod(positions) * patch * problem.itemsize
    yield row("GEMM", problem.flops, ASSUMED.matmul, patches)
    if (
        problem.w_shape[2:] == (3, 3)
        and set(problem.stride) == {1}
        and set(problem.dilation) == {1}
        and problem.groups == 1
    ):
        gain = (3 * _TILE) ** 2 / (_TILE + 2) ** 2
        workspace = _tile_bytes(problem)
        yield row("WINOGRAD", problem.flops / gain, ASSUMED.matmul, workspace)


def _transpose_ms(problem: ConvProblem, figures: DeviceFigures) -> float:
    """Return the time of transposing the images before and after the product."""
    if problem.layout == "NHWC":
        return 0.0
    elements = math.prod(problem.x_shape) + math.prod(problem.y_shape)
    nbytes = 2 * elements * problem.itemsize
    return 1e3 * nbytes / (figures.bandwidth.value * ASSUMED.memory)


def _tile_bytes(problem: ConvProblem) -> int:
    """Return the bytes of transformed inputs, outputs and filters."""
    n, k, *positions = problem.y_shape
    c = problem.x_shape[1]
    tiles = math.prod(-(-size // _TILE) for size in positions)
    points = (_TILE + 2) ** 2
    return points * (n * tiles * (c + k) + c * k) * problem.itemsize


def _node_ms(graph: Graph, node: Node, figures: DeviceFigures) -> float:
    if node.traits.view:
        return 0.0
    again = (node.inputs[index] for index in node.traits.reads_twice)
    touched = (*node.tensors, *node.mutates, *again)
    nbytes = sum(graph.tensors[name].nbytes for name in touched)
    if "parts" in node.attrs:  # it reads only the rows that it writes
        nbytes = 2 * sum(graph.tensors[name].nbytes for name in node.outputs)
    flops = 0.0
    if node.op == "matmul":  # 2 M N K, and the three operands' sizes make (M N K)²
        sizes = (math.prod(graph.tensors[name].shape) for name in node.tensors)
        flops = 2.0 * math.sqrt(math.prod(sizes))
    peak = figures.peak(graph.tensors[node.tensors[0]].dtype)
    return _roofline(flops, peak * ASSUMED.matmul, nbytes, figures)


def _roofline(flops: float, rate: float, nbytes: int, figures: DeviceFigures) -> float:
    arithmetic = flops / rate
    traffic = nbytes / (figures.bandwidth.value * ASSUMED.memory)
    return 1e3 * max(arithmetic, traffic) + ASSUMED.launch_ms
