"""Convolution nodes of a lowered graph as problems of ours, and how plans run them.

A plan that is PyTorch's kernel for the whole batch is the node's own call. Any other
takes its workspace from PyTorch's allocator, for as long as the call lasts.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mucudnn.backends.base import Backend, Buffer
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Node
from mucudnn.passes.scheduling.costs import origin
from mucudnn.torch.conv.algorithm import TORCH
from mucudnn.torch.conv.geometry import Geometry, Role
from mucudnn.torch.conv.kernels import Backward, Forward, Kernel, result_form
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand

__all__ = ["Site", "is_native", "with_plans"]

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_ROLES: dict[Any, Role] = {
    (0,): Role.INPUT_GRADIENT,
    (1,): Role.FILTER_GRADIENT,
    (1, 2): Role.FILTER_GRADIENT,
}
"""Which results of the backward operator one kernel computes, a bias's beside it."""


@dataclass(frozen=True)
class Site:
    """A convolution of a graph that a plan may run.

    Attributes:
        call: How PyTorch runs it.
        operands: How its operands lie.
        results: How its results lie.
        role: What it computes.
        problem: As which it is measured and planned.
        transposed: Whether it is of a transposed convolution.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    role: Role
    problem: ConvProblem
    transposed: bool

    @classmethod
    def of(cls, lowered: Lowered, node: Node) -> "Site | None":
        """What a node is; None if it is no convolution, or none of ours."""
        call = lowered.calls[node.name]
        layouts = tuple(lowered.layouts[name] for name in node.inputs)
        if any(layout.device.type != "cpu" for layout in layouts):
            return None
        if call.function is _FORWARD:
            role, (x, w, b), options = Role.OUTPUT, call.args[:3], call.args[3:]
            sizes = list(layouts[b.index].shape) if isinstance(b, Operand) else None
        elif call.function is _BACKWARD and call.results in _ROLES:
            role = _ROLES[call.results]
            (_, x, w, sizes), options = call.args[:4], call.args[4:-1]
        else:
            return None
        if not (isinstance(x, Operand) and isinstance(w, Operand)):
            return None
        x, w = (_like(layouts[leaf.index]) for leaf in (x, w))
        try:
            geometry = Geometry.of(x, w, sizes, tuple(options))
            problem = geometry.problem(role, x, w)
        except (MucudnnError, ValueError, RuntimeError):
            return None
        results = tuple(lowered.layouts[name] for name in node.outputs)
        shape, form = result_form(problem)
        ours = torch.empty(shape, device="meta", memory_format=form)
        if (results[0].shape, results[0].stride) != (ours.shape, ours.stride()):
            return None
        return cls(call, layouts, results, role, problem, geometry.transposed)

    @property
    def key(self) -> Hashable:
        """Equal for convolutions that cost the same."""
        return self.problem, self.operands, self.results, self.transposed

    @property
    def result_bytes(self) -> int:
        """Bytes of its results."""
        dense = (r.dtype.itemsize * math.prod(r.shape) for r in self.results)
        return sum(map(int, dense))

    def offers(self, backend: Backend, plan: ConvPlan) -> bool:
        """Whether a plan is one of this convolution, with the memory that it needs.

        What was measured may be less by the results, if they come behind it.
        """
        if plan.problem != self.problem:
            return False
        if is_native(plan):
            return True
        for step in plan.steps:
            offered = dict(backend.conv.algorithms(self.problem.with_batch(step.batch)))
            if offered.get(step.algo, math.inf) > plan.workspace + self.result_bytes:
                return False
        return True

    def bound(self, backend: Backend, plan: ConvPlan) -> Call:
        """The node's call by a plan."""
        if is_native(plan):
            return self.call
        nbytes = max(_needed(backend, self.problem, step) for step in plan.steps)
        kernel = Kernel(self.role, backend.bind(plan), nbytes, _workspace)
        return replace(self.call, function=self._function(kernel))

    def _function(self, kernel: Kernel) -> Callable[..., Any]:
        """In the place of PyTorch's operator, whose options it knows."""
        if self.role is Role.OUTPUT:
            biased = isinstance(self.call.args[2], Operand)
            forward = Forward(kernel, biased, len(self.problem.x_shape))
            return lambda x, w, b, *options: forward(x, w, b)
        kernels: Sequence[Kernel | None] = [kernel, None]
        if self.role is Role.FILTER_GRADIENT:
            kernels = [None, kernel]
        backward = Backward(kernels, self.transposed, self.call.args[-1])
        return lambda gy, x, w, *options: backward(_none_left, gy, x, w)


def is_native(plan: ConvPlan) -> bool:
    """Whether it is PyTorch's kernel for the whole batch."""
    return not plan.divided and plan.steps[0].algo == TORCH


def with_plans(
    lowered: Lowered, plans: Mapping[str, ConvPlan], backend: Backend
) -> Lowered:
    """The graph with its convolutions run by plans.

    Args:
        lowered: The graph that was planned.
        plans: Node of the planned schedule -> plan.
        backend: Has their algorithms.
    """
    sites: dict[str, Site | None] = {}
    made: dict[tuple[str, ConvPlan], Call] = {}
    calls = {}
    for name, plan in plans.items():
        first = origin(name)
        if first not in sites:
            sites[first] = Site.of(lowered, lowered.graph.by_name[first])
        site = sites[first]
        if site is not None:
            if (first, plan) not in made:
                made[first, plan] = site.bound(backend, plan)
            calls[name] = made[first, plan]
    return replace(lowered, planned=calls)


def _like(layout: Layout) -> torch.Tensor:
    """A tensor that lies so; nothing is in it."""
    shape, stride = layout.shape, layout.stride
    return torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)


def _needed(backend: Backend, problem: ConvProblem, step: Any) -> int:
    offered = dict(backend.conv.algorithms(problem.with_batch(step.batch)))
    return offered[step.algo]


def _workspace(nbytes: int) -> Buffer | None:
    if not nbytes:
        return None
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()


def _none_left(mask: Sequence[bool]) -> Any:
    raise AssertionError(f"no gradient is PyTorch's here, {mask} was asked for")
