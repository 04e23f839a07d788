"""What a training step moves on a GPU: launches, bytes and FLOPs, counted, not timed.

The cuda backend's own operations are called with arrays of the right shapes and no
memory behind them, and every launch is noted with the bytes of the arrays it is given;
what an update overwrites counts twice, but for a copy that it only writes.
Convolutions count their operands once; updates that follow one another are one launch,
as an executor has them. Where steps are fused, convolutions take in a bias and a ReLU
for which cuDNN 9.19 lists engines on an H200. What kernels for tensor cores move inside
where channels come first, images turned to channels last and back, stands by itself: it
is what a layout with channels last saves, and its own turning what it costs. Beside it
stands the least that any implementation moves: operands of convolutions and matrix
products once, and what the update reads and writes; everything else could be fused.
What updates move is told apart: in mixed precision they read and write masters and
state in single precision, as many bytes as without it, so a network of many parameters
cannot move half of the bytes.

Where PyTorch is installed, its eager step of the same network is counted as well
(`traffic_eager`), and both are estimated for an H200 by its published figures: every
launch at the peak of its bytes or of its FLOPs, whichever binds it. Kernels reach a
part of that, on both sides; what the host costs, and launches that wait, are not in it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from bench.table import render
from bench.traffic_beside import beside_eager, eager_tables
from bench.traffic_counts import Rates, Traffic, rates_of
from mucudnn.backends.cuda.kernels import KERNELS
from mucudnn.backends.cuda.kernels.launch import KernelCall, KernelLaunch
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import TensorSpec
from mucudnn.models import get_model
from mucudnn.passes.graph.layouts import with_layout
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step

__all__ = ["BATCHES", "run", "table", "traffic_of"]

BATCHES = {"resnet50": 256, "vgg16": 128, "unet2d": 16}
"""Network -> images in a step."""

PRECISIONS = (None, "float16", "bfloat16")
_GB = 1e9


@dataclass
class _Counting:
    """A launcher that launches nothing."""

    traffic: Traffic

    def launch(self, launch: KernelLaunch) -> None:
        if 0 not in launch.blocks:
            arrays = (a.nbytes for a in launch.arguments if isinstance(a, np.ndarray))
            self.traffic.add(1, sum(arrays))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        nbytes = a.nbytes + b.nbytes + out.nbytes
        self.traffic.add(1, nbytes, 2.0 * a.shape[0] * a.shape[1] * b.shape[1])

    def copy(self, source: Any, target: Any) -> None:
        read = source.nbytes if isinstance(source, np.ndarray) else 0
        self.traffic.add(1, read + target.nbytes)

    def table(self, rows: Any) -> Any:
        return np.zeros(0)

    def address(self, array: Any) -> int:
        return 0


def traffic_of(graph: Graph, rates: Rates | None = None) -> dict[str, Traffic]:
    """Operation -> what its nodes move in one step of a graph."""
    rates = rates or rates_of(None)
    found: dict[str, Traffic] = {}
    copies = frozenset(copies_of_parameters(graph).values())
    launched = (node for node in graph.nodes if not node.traits.view)
    for op, nodes in groupby(launched, lambda node: node.op):
        of_op, run = found.setdefault(op, Traffic(rates)), tuple(nodes)
        if op == "conv":
            for node in run:
                problem = node.attrs["problem"]
                of_op.add(1, _operand_bytes(graph, node), problem.flops)
            continue
        one = Traffic(rates)
        for node in run:
            KERNELS[op].run(_call(graph, node, one))
            changed = set(node.mutates).difference(copies)
            again = sum(graph.tensors[name].nbytes for name in changed)
            one.add(0, again)
        of_op.join(one, _launches(graph, run, one.launches))
    return found


def _call(graph: Graph, node: Node, counted: Traffic) -> KernelCall:
    """A node's call, which launches nothing and is counted."""
    inputs, outputs, attrs = operands_of(graph, node)
    scratch = KERNELS[node.op].workspace(inputs, outputs, attrs)
    return KernelCall(
        _Counting(counted),
        [_array(spec) for spec in inputs],
        [_array(spec) for spec in outputs],
        attrs,
        _array(TensorSpec("workspace", (scratch,), "uint8")),
    )


def _launches(graph: Graph, run: Sequence[Node], apart: int) -> int:
    """Of nodes of one operation in a row; `apart` is how many if each has its own."""
    together = KERNELS[run[0].op].run_batched
    if together is None or len(run) < 2:
        return apart
    joined = Traffic()
    together([_call(graph, node, joined) for node in run])
    return joined.launches


def least_bytes(graph: Graph) -> int:
    """Bytes that any implementation moves: expensive operands once, and the update."""
    return sum(
        _operand_bytes(graph, node)
        for node in graph.nodes
        if node.traits.expensive or node.phase is Phase.UPDATE
    )


def run() -> dict[str, Any]:
    """Count steps of every network in every precision. Ready for JSON."""
    kinds = ((False, "NCHW"), (True, "NCHW"), (True, "NHWC"))
    steps = [
        _step(model, batch, precision, fuse, layout)
        for model, batch in BATCHES.items()
        for precision in PRECISIONS
        for fuse, layout in kinds
    ]
    fused = [step for step in steps if step["fused"]]
    return {"steps": steps, "eager": beside_eager(fused)}


def table(result: Mapping[str, Any]) -> str:
    """A line a step, and what moves most in each."""
    header: tuple[str, ...] = (
        "model",
        "precision",
        "fused",
        "layout",
        "launches",
        "GB",
        "conv GB",
        "beside GB",
    )
    header += ("update GB", "turned inside GB", "least GB", "TFLOP")
    header += ("most beside convolutions, GB",)
    rows = []
    for step in result["steps"]:
        beside = Counter(
            {op: t["bytes"] for op, t in step["operations"].items() if op != "conv"}
        )
        most = ", ".join(f"{op} {n / _GB:.1f}" for op, n in beside.most_common(5))
        rows.append(
            (
                f"{step['model']} N={step['batch']}",
                step["precision"],
                "yes" if step["fused"] else "no",
                step["layout"],
                step["launches"],
                step["bytes"] / _GB,
                step["conv_bytes"] / _GB,
                (step["bytes"] - step["conv_bytes"]) / _GB,
                step["update_bytes"] / _GB,
                step["turned_inside_bytes"] / _GB,
                step["least_bytes"] / _GB,
                step["flops"] / 1e12,
                most,
            )
        )
    tables = [render(header, rows), *eager_tables(result["eager"])]
    return "\n\n".join(tables)


def _listed(problem: ConvProblem, bias: str) -> bool:
    """Whether cuDNN 9.19 has engines for a convolution with a bias and a ReLU."""
    return bias == problem.dtype or problem.layout == "NHWC"


def turned_inside(graph: Graph) -> int:
    """Bytes that kernels for tensor cores move to turn images and back."""
    problems = (node.attrs["problem"] for node in graph.nodes if node.op == "conv")
    return sum(
        2 * p.itemsize * (math.prod(p.x_shape) + math.prod(p.y_shape))
        for p in problems
        if p.layout == "NCHW"
    )


def _step(
    model: str, batch: int, precision: str | None, fuse: bool, layout: str = "NCHW"
) -> dict[str, Any]:
    recipe = StepRecipe(
        optimizer=Momentum(0.1), update_when="late", precision=precision, fuse=fuse
    )
    choices = StepChoices(
        layout=lambda graph, trains: with_layout(graph, layout), epilogue=_listed
    )
    (graph,) = build_step(get_model(model)(batch), recipe, choices).steps
    found = traffic_of(graph, rates_of(precision))
    updates = {node.op for node in graph.nodes if node.phase is Phase.UPDATE}
    return {
        "model": model,
        "batch": batch,
        "precision": precision or "float32",
        "fused": fuse,
        "layout": layout,
        "launches": sum(t.launches for t in found.values()),
        "bytes": sum(t.nbytes for t in found.values()),
        "conv_bytes": found["conv"].nbytes,
        "update_bytes": sum(found[op].nbytes for op in updates),
        "turned_inside_bytes": turned_inside(graph),
        "least_bytes": least_bytes(graph),
        "flops": sum(t.flops for t in found.values()),
        "ms": sum(t.ms for t in found.values()),
        "operations": {
            op: {"launches": t.launches, "bytes": t.nbytes, "flops": t.flops}
            for op, t in sorted(found.items())
        },
    }


def _operand_bytes(graph: Graph, node: Node) -> int:
    return sum(graph.tensors[name].nbytes for name in (*node.inputs, *node.outputs))


def _array(spec: TensorSpec) -> Any:
    """An array of this shape and type over the bytes of one element."""
    return np.broadcast_to(np.zeros((), _dtype(spec.dtype)), spec.shape)


def _dtype(name: str) -> Any:
    return np.dtype(np.uint16 if name == "bfloat16" else name)
