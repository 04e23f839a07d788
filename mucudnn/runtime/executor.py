"""Interpret a schedule on a backend.

A schedule is bound once: every tensor becomes a view at its place in one arena, every
node a call without arguments. Running it is then a loop over calls; nothing is
allocated, and what a node costs beside its kernel is a function call.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Node
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.placement import Placement
from mucudnn.runtime.execution import compile_plan

__all__ = ["Executor"]

Call = Callable[[], None]

VIEWS = frozenset({"reshape"})
"""Operations without a kernel: their result is the input's bytes."""


class Executor:
    """A schedule bound to a backend, run step after step.

    Args:
        backend: Computes.
        schedule: What to run.
        placement: Where in the arena each storage and workspace is.
        plans: Convolution node -> how to run it.
        state: Arrays of the persistent tensors; shared with other executors.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
        OutOfMemoryError: There is no room for the arena.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        placement: Placement,
        plans: Mapping[str, ConvPlan],
        state: Mapping[str, Array],
    ) -> None:
        self._backend = backend
        self._graph = schedule.graph
        self._placement = placement
        self._plans = plans
        self._state = state
        self._arena = backend.device.allocate(placement.nbytes)
        self._arrays = {name: self._array(name) for name in self._graph.tensors}
        self._feeds = [spec.name for spec in self._graph.with_role(Role.INPUT)]
        self._program = self._bind(schedule)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena: everything that does not outlive a step."""
        return self._placement.nbytes

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step.

        Args:
            feeds: NumPy arrays for the graph's inputs; others are not looked at.

        Returns:
            The graph's outputs as NumPy arrays of their own.

        Raises:
            ValueError: An input is missing, or of another shape or type.
            BackendError: A kernel failed.
        """
        device = self._backend.device
        for name in self._feeds:
            device.upload(_checked(self._graph.tensors[name], feeds), self[name])
        for call in self._program:
            call()
        return {name: device.download(self[name]) for name in self._graph.outputs}

    def __getitem__(self, tensor: str) -> Array:
        """A tensor's array; its contents mean something while it is alive."""
        return self._arrays[tensor]

    def _array(self, name: str) -> Array:
        spec = self._graph.tensors[name]
        storage = self._graph.storages[name]
        device = self._backend.device
        if self._graph.tensors[storage].role in PERSISTENT:
            return self._state[storage]
        return device.view(self._arena, self._placement.offsets[storage], spec)

    def _bind(self, schedule: Schedule) -> list[Call]:
        nodes = {node.name: node for node in self._graph.nodes}
        program = []
        for instruction in schedule.instructions:
            match instruction:
                case Alloc() | Free():  # places are fixed
                    continue
                case Compute(name):
                    if (call := self._node(nodes[name])) is not None:
                        program.append(call)
                case SwapOut() | SwapIn() | Wait():
                    raise UnsupportedError("this executor moves nothing to the host")
        return program

    def _node(self, node: Node) -> Call | None:
        if node.op in VIEWS:
            return None
        inputs = [self[name] for name in node.inputs]
        outputs = [self[name] for name in node.outputs]
        workspace = self._workspace(node)
        if node.op == "conv":
            runner = compile_plan(self._backend, self._plans[node.name])
            a, b = inputs
            out = outputs[0]
            return lambda: runner.run(a, b, out, workspace, False)
        kernel = self._backend.kernels.get(node.op)
        if kernel is None:
            raise UnsupportedError(
                f"backend {self._backend.name!r} has no kernel for {node.op!r} "
                f"({node.name})"
            )
        run, attrs = kernel.run, node.attrs
        return lambda: run(inputs, outputs, attrs, workspace)

    def _workspace(self, node: Node) -> Buffer:
        nbytes = self._placement.workspaces.get(node.name, (0, 0))[1]
        if nbytes == 0:
            return None
        offset = self._placement.workspaces[node.name][0]
        spec = TensorSpec(f"{node.name}:workspace", (nbytes,), "uint8")
        return self._backend.device.view(self._arena, offset, spec)


def _checked(spec: TensorSpec, feeds: Mapping[str, Any]) -> Any:
    try:
        value = feeds[spec.name]
    except KeyError:
        raise ValueError(f"input {spec.name!r} was not given") from None
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"input {spec.name!r} must be {spec.dtype} {spec.shape}, got "
            f"{value.dtype} {value.shape}"
        )
    return value
