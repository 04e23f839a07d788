"""Run a graph without a schedule: each node finds its operands on the device.

Nodes run in the order of the graph. Before each, its tensors and its workspace are
brought into a pool of so many bytes, and what was not used for longest makes room;
afterwards what no later node uses is forgotten. Nothing is decided beforehand, so any
graph runs in any pool that holds its largest node, and every copy is waited for: what
planned steps are to be compared with.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.baselines.tensor_cache import CacheStatistics, TensorCache
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Array, Buffer, Tier
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.liveness import written
from mucudnn.runtime.executor import fed
from mucudnn.runtime.executor.arena import Pool
from mucudnn.runtime.executor.program import kernel_of
from mucudnn.runtime.executor.tasks import Copies
from mucudnn.runtime.executor.tiers import HostTier
from mucudnn.runtime.training.sizes import WorkingSet, kernel_workspaces

__all__ = ["PagedExecutor", "least_pool_bytes"]

Launch = Callable[[Sequence[Array], Sequence[Array], Buffer | None], None]


@dataclass(frozen=True, slots=True)
class _Work:
    """A node that runs, and what it does to memory.

    Attributes:
        node: The node.
        launch: (inputs, outputs, workspace) -> nothing.
        needed: What is in the pool while it runs.
        written: Storages of these that it changes.
        dead: Storages of these that no later node touches, and its workspace.
    """

    node: Node
    launch: Launch
    needed: WorkingSet
    written: tuple[str, ...]
    dead: tuple[str, ...]


def least_pool_bytes(
    backend: Backend, graph: Graph, plans: Mapping[str, ConvPlan]
) -> int:
    """Bytes of the smallest pool in which a graph runs: those of its largest node."""
    works = _works(backend, graph, plans)
    return max((work.needed.pool_bytes for work in works), default=0)


class PagedExecutor:
    """A graph run node by node in a pool, step after step.

    The results are bit for bit those of an `Executor` with the same plans.

    Args:
        backend: Computes.
        graph: What to run, in this order.
        plans: Convolution node -> how to run it.
        state: Arrays of the persistent tensors, which are not in the pool.
        nbytes: Size of the pool: everything else has its place there.
        host: Where tensors go that leave the pool, the preferred tier first; by default
            as much host memory as all of them have, which is always enough.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
        OutOfMemoryError: The pool cannot hold the largest node, which is named; or
            there is no room for the pool or on the host.
    """

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        plans: Mapping[str, ConvPlan],
        state: Mapping[str, Array],
        nbytes: int,
        *,
        host: Sequence[Tier] | None = None,
    ) -> None:
        self._device = backend.device
        self._graph = graph
        self._state = state
        self._inputs = {spec.name: spec for spec in graph.with_role(Role.INPUT)}
        self._work = _works(backend, graph, plans)
        _check_room(self._work, nbytes)
        self._own: list[Tier] = []
        if host is None:
            host = self._own = [HostTier(backend.device, _host_bytes(self._work))]
        self._copies = Copies([backend.device.copier])
        self.pool = Pool(backend.device, nbytes)
        self._cache = TensorCache(self.pool, host, self._copies)

    @property
    def statistics(self) -> CacheStatistics:
        """What paging did in all steps so far."""
        return self._cache.statistics

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step.

        After an error, whatever it was, the pool is empty and another step can be run.

        Args:
            feeds: NumPy arrays for the graph's inputs; others are not looked at.

        Returns:
            The graph's outputs as NumPy arrays of their own.

        Raises:
            ValueError: An input is missing, or of another shape or type.
            OutOfMemoryError: The host has no room for what has to leave the pool; the
                message names the node.
            BackendError: A kernel or a copy failed.
        """
        given = {name: fed(spec, feeds) for name, spec in self._inputs.items()}
        try:
            with self._copies.of_a_step():
                for work in self._work:
                    self._do(work, given)
                return {name: self._result(name, given) for name in self._graph.outputs}
        finally:
            self._cache.clear()

    def close(self) -> None:
        """Free the pool, and the host memory if it is its own."""
        self._copies.close()
        self.pool.close()
        for tier in self._own:
            tier.close()

    def _do(self, work: _Work, given: Mapping[str, Any]) -> None:
        """Run one node, and forget what it was the last to use."""
        node = work.node
        try:
            with self._on_device(work.needed.tensors, work.written, given):
                scratch = work.needed.workspace
                work.launch(
                    [self._array(name) for name in node.inputs],
                    [self._array(name) for name in node.outputs],
                    None if scratch is None else self._cache.view(scratch.name),
                )
        except OutOfMemoryError as e:
            raise OutOfMemoryError(f"node {node.name!r} ({node.op}): {e}") from e
        for name in work.dead:
            self._cache.release(name)

    def _result(self, name: str, given: Mapping[str, Any]) -> Any:
        """An output as a NumPy array; it may have left the device."""
        storage = self._graph.tensors[self._graph.storages[name]]
        pinned = () if storage.role in PERSISTENT else (storage,)
        with self._on_device(pinned, (), given):
            return self._device.download(self._array(name))

    @contextmanager
    def _on_device(
        self,
        specs: Sequence[TensorSpec],
        written: Sequence[str],
        given: Mapping[str, Any],
    ) -> Iterator[None]:
        """Have tensors in the pool; an input is uploaded when it is first wanted."""
        new = [spec for spec in specs if spec.name not in self._cache]
        for spec in new:
            self._cache.declare(spec)
        with self._cache.pinned([spec.name for spec in specs], written):
            for spec in new:
                if spec.name in given:
                    self._device.upload(given[spec.name], self._cache.view(spec.name))
            yield

    def _array(self, name: str) -> Array:
        """A tensor that is on the device."""
        spec = self._graph.tensors[name]
        storage = self._graph.storages[name]
        if self._graph.tensors[storage].role in PERSISTENT:
            array = self._state[storage]
            same = spec.shape == self._graph.tensors[storage].shape
            return array if same else array.reshape(spec.shape)
        return self._cache.view(storage, spec)


def _works(
    backend: Backend, graph: Graph, plans: Mapping[str, ConvPlan]
) -> tuple[_Work, ...]:
    """The nodes that do anything, in order."""
    workspaces = kernel_workspaces(backend, graph)
    workspaces |= {node: plan.workspace for node, plan in plans.items()}
    needs = {
        node.name: WorkingSet.of_node(graph, node, workspaces.get(node.name, 0))
        for node in graph.nodes
        if not node.traits.view
    }
    needs = {name: needed.within_a_step() for name, needed in needs.items()}
    last = {spec.name: name for name, n in needs.items() for spec in n.tensors}
    asked = {graph.storages[name] for name in graph.outputs}
    works = []
    for name, needed in needs.items():
        node = graph.by_name[name]
        names = [spec.name for spec in needed.tensors]
        works.append(
            _Work(
                node=node,
                launch=_launch(backend, node, plans),
                needed=needed,
                written=tuple(s for s in written(graph, node) if s in names),
                dead=tuple(s for s in names if last[s] == name and s not in asked),
            )
        )
    return tuple(works)


def _check_room(works: Sequence[_Work], nbytes: int) -> None:
    """Raise `OutOfMemoryError` where a pool does not hold every node."""
    for work in works:
        if work.needed.pool_bytes > nbytes:
            raise OutOfMemoryError(
                f"node {work.node.name!r} ({work.node.op}) does not fit into a pool of "
                f"{format_bytes(nbytes)} ({nbytes} bytes): it uses {work.needed} at "
                f"once; the largest node needs "
                f"{max(w.needed.pool_bytes for w in works)} bytes"
            )


def _launch(backend: Backend, node: Node, plans: Mapping[str, ConvPlan]) -> Launch:
    """What runs a node."""
    if node.op == "conv":
        runner = backend.bind(plans[node.name])
        return lambda inputs, outputs, workspace: runner.run(
            inputs[0], inputs[1], outputs[0], workspace, False
        )
    run, attrs = kernel_of(backend, node).run, node.attrs
    return lambda inputs, outputs, workspace: run(inputs, outputs, attrs, workspace)


def _host_bytes(works: Iterable[_Work]) -> int:
    """Bytes of all that could ever leave the pool."""
    tensors = {spec: None for work in works for spec in work.needed.operands}
    return WorkingSet(tuple(tensors)).pool_bytes
