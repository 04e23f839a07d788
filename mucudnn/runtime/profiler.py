"""Time every node of a graph on a backend, each distinct one once."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mucudnn.backends.base import Backend, Kernel
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import ITEMSIZE, TensorSpec
from mucudnn.passes.dependencies import VIEWS
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.runtime.bench_kernels import operands
from mucudnn.runtime.execution import compile_plan
from mucudnn.runtime.timing import StoppingRule, measure
from mucudnn.runtime.tuner import Tuner

__all__ = ["kernel_of", "kernel_workspaces", "measure_link", "profile", "refine"]

_LINK_BYTES = 64 << 20
_RULE = StoppingRule(min_samples=3, max_samples=7, budget_ms=60.0)
_NO_LIMIT = 1 << 62
_CACHE_BYTES = 64 << 20
"""More than the caches of a processor hold, and of a GPU."""


def kernel_workspaces(backend: Backend, graph: Graph) -> dict[str, int]:
    """Bytes of scratch memory of every node that has a kernel and asks for some.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
    """
    sizes = {}
    for node in graph.nodes:
        if node.op == "conv" or node.op in VIEWS:
            continue
        kernel = kernel_of(backend, node)
        inputs, outputs = _specs(graph, node)
        nbytes = kernel.workspace(inputs, outputs, node.attrs)
        if nbytes:
            sizes[node.name] = nbytes
    return sizes


def kernel_of(backend: Backend, node: Node) -> Kernel:
    """What runs a node that is neither a convolution nor a view.

    Raises:
        UnsupportedError: The backend has nothing that does.
    """
    kernel = backend.kernels.get(node.op)
    if kernel is None:
        raise UnsupportedError(
            f"backend {backend.name!r} has no kernel for {node.op!r} ({node.name})"
        )
    return kernel


def profile(
    tuner: Tuner,
    graph: Graph,
    *,
    rule: StoppingRule | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """Measure a graph: kernels by running them, convolutions by their Pareto fronts.

    Args:
        tuner: Measures the convolutions; its backend runs the kernels.
        graph: Of a step.
        rule: When a kernel has been timed enough.
        progress: Called with a node's name, how many are done, and of how many.
    """
    backend = tuner.backend
    rule = rule or _RULE
    workspaces = kernel_workspaces(backend, graph)
    cold = _Cold(backend, rule)
    times: dict[Hashable, float] = {}
    fronts_of: dict[ConvProblem, tuple[ConvPlan, ...]] = {}
    node_ms, fronts = {}, {}
    for i, node in enumerate(graph.nodes):
        if node.op == "conv":
            problem = node.attrs["problem"]
            if problem not in fronts_of:
                table = tuner.measure(problem)
                front = pareto_plans(table, _NO_LIMIT)
                fronts_of[problem] = _in_step(tuner, front, cold)
            fronts[node.name] = fronts_of[problem]
            node_ms[node.name] = min(p.time_ms for p in fronts_of[problem])
        else:
            key = _signature(graph, node)
            if key not in times:
                nbytes = workspaces.get(node.name, 0)
                times[key] = _kernel_ms(backend, graph, node, nbytes, cold)
            node_ms[node.name] = times[key]
        if progress is not None:
            progress(node.name, i + 1, len(graph.nodes))
    out_rate, in_rate = measure_link(backend)
    return Profile(
        node_ms=node_ms,
        workspaces=workspaces,
        fronts=fronts,
        out_bytes_per_ms=out_rate,
        in_bytes_per_ms=in_rate,
    )


class _Cold:
    """Times kernels as a step finds them: with their operands out of the caches."""

    def __init__(self, backend: Backend, rule: StoppingRule) -> None:
        self._device = backend.device
        self._rule = rule
        spec = TensorSpec("evicting", (_CACHE_BYTES,), "uint8")
        self._zeros = np.zeros(spec.shape, spec.dtype)
        self._buffer = self._device.view(self._device.allocate(spec.nbytes), 0, spec)

    def ms(self, run: Callable[[], None]) -> float:
        """Median time of a kernel; its first run does not count."""
        device = self._device
        run()
        samples: list[float] = []
        while not self._rule.enough(samples):
            device.upload(self._zeros, self._buffer)
            start = device.begin()
            run()
            samples.append(device.elapsed_ms(start, device.record()))
        return statistics.median(samples)


def _in_step(
    tuner: Tuner, front: Sequence[ConvPlan], cold: _Cold
) -> tuple[ConvPlan, ...]:
    """Plans with the times that they take within a step.

    The tuner's own times are of kernels that repeat, with their operands in the caches.
    The fastest plan is timed cold, and the others are taken to slow down as much.
    """
    fastest = min(front, key=lambda plan: plan.time_ms)
    measured = _plan_ms(tuner, fastest, cold)
    if measured is None or not fastest.time_ms:
        return tuple(front)
    ratio = measured / fastest.time_ms
    return tuple(_taking(plan, plan.time_ms * ratio) for plan in front)


def refine(
    tuner: Tuner,
    known: Profile,
    plans: Iterable[ConvPlan],
    times: dict[ConvPlan, float],
    *,
    rule: StoppingRule | None = None,
) -> Profile:
    """A profile in which some plans have the time that they take themselves.

    Args:
        tuner: Whose backend runs them.
        known: The profile so far.
        plans: Of its fronts; those that a step was planned with.
        times: What was measured so far, by plan; grows. A plan in it is not measured
            again.
        rule: When a plan has been timed enough.
    """
    cold = _Cold(tuner.backend, rule or _RULE)
    better: dict[ConvPlan, ConvPlan] = {}
    for plan in dict.fromkeys(plans):
        if plan in times:
            continue
        measured = _plan_ms(tuner, plan, cold)
        if measured is not None:
            better[plan] = _taking(plan, measured)
            times[better[plan]] = measured
    fronts = {
        name: tuple(better.get(plan, plan) for plan in front)
        for name, front in known.fronts.items()
    }
    node_ms = dict(known.node_ms)
    node_ms.update((n, min(p.time_ms for p in front)) for n, front in fronts.items())
    return replace(known, fronts=fronts, node_ms=node_ms)


def _plan_ms(tuner: Tuner, plan: ConvPlan, cold: _Cold) -> float | None:
    """Time of a plan with cold operands; None where memory is short for that."""
    backend = tuner.backend
    try:
        a, b, out = operands(backend, plan.problem, plan.workspace, tuner.memory_limit)
        scratch = backend.device.allocate(plan.workspace)
    except OutOfMemoryError:
        return None
    runner = compile_plan(backend, plan)
    return cold.ms(lambda: runner.run(a, b, out, scratch, False))


def _taking(plan: ConvPlan, ms: float) -> ConvPlan:
    """The plan, its parts taking `ms` together."""
    ratio = ms / plan.time_ms if plan.time_ms else 1.0
    steps = (replace(step, time_ms=step.time_ms * ratio) for step in plan.steps)
    return replace(plan, steps=tuple(steps))


def measure_link(backend: Backend, nbytes: int = _LINK_BYTES) -> tuple[float, float]:
    """Bytes a millisecond to the host and from it, in copies of `nbytes`."""
    device = backend.device
    spec = TensorSpec("link", (nbytes,), "uint8")
    buffer, host = device.view(device.allocate(nbytes), 0, spec), device.host(nbytes)
    _zero(device, buffer, spec)
    rule = StoppingRule(min_samples=3, max_samples=5)
    copier = device.copier()
    try:
        out = measure(lambda: copier.wait(copier.out(buffer, host)), device, rule)
        back = measure(lambda: copier.wait(copier.back(host, buffer)), device, rule)
    finally:
        copier.close()
    least = 1e-9
    return nbytes / max(out.time_ms, least), nbytes / max(back.time_ms, least)


def _kernel_ms(
    backend: Backend, graph: Graph, node: Node, nbytes: int, cold: _Cold
) -> float:
    if node.op in VIEWS:
        return 0.0
    kernel = kernel_of(backend, node)
    device = backend.device
    buffers: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name in node.tensors:
        spec, storage = graph.tensors[name], graph.storages[name]
        fresh = storage not in buffers
        if fresh:
            buffers[storage] = device.allocate(spec.nbytes)
        arrays[name] = device.view(buffers[storage], 0, spec)
        if fresh and spec.dtype in ITEMSIZE:
            device.randomize(arrays[name])
        elif fresh:
            _zero(device, arrays[name], spec)
    inputs = [arrays[name] for name in node.inputs]
    outputs = [arrays[name] for name in node.outputs]
    workspace = device.allocate(nbytes) if nbytes else None

    def run() -> None:
        kernel.run(inputs, outputs, node.attrs, workspace)

    return cold.ms(run)


def _zero(device: Any, view: Any, spec: TensorSpec) -> None:
    device.upload(np.zeros(spec.shape, spec.dtype), view)


def _specs(graph: Graph, node: Node) -> tuple[list[TensorSpec], list[TensorSpec]]:
    return (
        [graph.tensors[name] for name in node.inputs],
        [graph.tensors[name] for name in node.outputs],
    )


def _signature(graph: Graph, node: Node) -> Hashable:
    """What decides a kernel's time: operation, shapes, attributes, shared memory."""
    storages = [graph.storages[name] for name in node.tensors]
    return (
        node.op,
        tuple((graph.tensors[n].shape, graph.tensors[n].dtype) for n in node.tensors),
        tuple(sorted((k, v) for k, v in node.attrs.items() if k != "seed")),
        tuple(storages.index(s) for s in storages),
    )
