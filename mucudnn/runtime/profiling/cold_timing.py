"""Time a kernel as a step finds it: its operands made long ago, out of the caches.

All device memory comes from one pool: operands and workspaces, the buffer whose writing
evicts the caches before every run, and the one that is copied to measure the link. So
measuring keeps a budget in bytes, and kernels see memory as they do in an arena.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import numpy as np

from mucudnn.backends.base import Array, Backend, Buffer, Device, Tier
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import ITEMSIZE, Role, TensorSpec
from mucudnn.runtime.executor.host_memory import HostTier
from mucudnn.runtime.executor.memory_pool import Pool
from mucudnn.runtime.training.step.sizes import WorkingSet
from mucudnn.runtime.tuning.timing import StoppingRule, measure

__all__ = [
    "EVICTING_BYTES",
    "LINK_BYTES",
    "ColdBench",
    "cold_bench",
    "link_rates",
]

EVICTING_BYTES = 64 << 20
"""More than the caches of a processor hold, and of a GPU."""

LINK_BYTES = 64 << 20
"""Large enough that starting a copy takes no time beside it."""

_COPIES = 64
_NAME = "the memory for measuring"


class ColdBench:
    """Times kernels and copies in a pool, which is empty between two calls."""

    def __init__(self, backend: Backend, pool: Pool, rule: StoppingRule) -> None:
        self._backend = backend
        self._device = backend.device
        self._pool = pool
        self._rule = rule
        self._zeros = np.zeros(min(EVICTING_BYTES, pool.nbytes), np.uint8)

    def node_ms(self, graph: Graph, node: Node, workspace: int) -> float:
        """Median time of a node that has a kernel; its first run does not count.

        `workspace` is what its kernel asks for, in bytes; it is no convolution or view.

        Raises:
            OutOfMemoryError: The pool does not hold its tensors.
        """
        needed = WorkingSet.of_node(graph, node, workspace)
        kernel, pool = self._backend.kernels[node.op], self._pool
        with self._held(needed) as scratch:
            for spec in needed.operands:
                self._fill(spec)

            def views(specs: Sequence[TensorSpec]) -> list[Array]:
                return [pool.view(graph.storages[spec.name], spec) for spec in specs]

            reads, writes, attrs = operands_of(graph, node)
            inputs, outputs = views(reads), views(writes)
            return self._median(kernel.call(inputs, outputs, attrs, scratch))

    def plan_ms(self, plan: ConvPlan) -> float | None:
        """Median time of a convolution; None where the pool does not hold it."""
        needed = WorkingSet.of_plan(plan)
        if needed.pool_bytes > self._pool.nbytes:
            return None
        with self._held(needed) as scratch:
            a, b, out = (self._pool.view(s.name, s) for s in needed.operands)
            self._device.randomize(a)
            self._device.randomize(b)
            runner = self._backend.bind(plan)
            return self._median(lambda: runner.run(a, b, out, scratch, False))

    def calls_ms(
        self,
        needed: WorkingSet,
        made: Callable[[Sequence[Array], Buffer | None], Sequence[Callable[[], None]]],
    ) -> tuple[float, ...]:
        """Median times of calls on tensors of random numbers.

        Args:
            needed: The tensors, and the workspace.
            made: (the tensors, the workspace) -> the calls.

        Raises:
            OutOfMemoryError: The pool does not hold the tensors.
        """
        with self._held(needed) as scratch:
            for spec in needed.operands:
                self._fill(spec)
            views = [self._pool.view(spec.name, spec) for spec in needed.operands]
            return tuple(self._median(call) for call in made(views, scratch))

    def link(self, nbytes: int = LINK_BYTES) -> tuple[float, float]:
        """Bytes a millisecond to the host and from it.

        In a smaller pool several copies follow one another, from and to different bytes
        of the host, so that starting them and caches count less.

        The pool may be smaller than `nbytes`.

        Raises:
            OutOfMemoryError: The pool has not a single byte.
        """
        size = min(nbytes, self._pool.nbytes)
        if size == 0:
            raise OutOfMemoryError("copies of no bytes cannot be timed; give some")
        spec = TensorSpec("the link's buffer", (size,), "uint8")
        with self._held(WorkingSet((), spec)) as buffer:
            self._device.upload(np.zeros(spec.shape, np.uint8), buffer)
            copies = min(_COPIES, -(-nbytes // size))
            host = HostTier(self._device, copies * size)
            return link_rates(self._device, buffer, host)

    @contextmanager
    def _held(self, needed: WorkingSet) -> Iterator[Buffer | None]:
        """Have tensors in the pool during a `with`, which gets the workspace."""
        taken = []
        try:
            for spec in needed.tensors:
                self._pool.allocate(spec.name, spec.nbytes)
                taken.append(spec.name)
            scratch = needed.workspace
            yield None if scratch is None else self._pool.buffer(scratch.name)
        finally:
            for name in taken:
                self._pool.free(name)

    def _fill(self, spec: TensorSpec) -> None:
        """Random numbers, or zeros where numbers mean something.

        Such as labels, and sums of squares in the state.
        """
        array = self._pool.view(spec.name, spec)
        if spec.dtype in ITEMSIZE and spec.role is not Role.STATE:
            self._device.randomize(array)
        else:
            self._device.upload(np.zeros(spec.shape, spec.dtype), array)

    def _median(self, run: Callable[[], None]) -> float:
        """Median time with what the pool has left evicting the caches before each."""
        device = self._device
        run()
        samples: list[float] = []
        nbytes = min(EVICTING_BYTES, self._pool.largest_hole)
        spec = TensorSpec("the evicting buffer", (nbytes,), "uint8")
        with self._held(WorkingSet((), spec)) as buffer:
            while not self._rule.enough(samples):
                if nbytes:
                    device.upload(self._zeros[:nbytes], buffer)
                start = device.begin()
                run()
                samples.append(device.elapsed_ms(start, device.record()))
        return statistics.median(samples)


@contextmanager
def cold_bench(
    backend: Backend, sizes: Sequence[int], memory: int | None, rule: StoppingRule
) -> Iterator[ColdBench]:
    """A bench in a pool for the largest working set that there is memory for.

    `sizes` are bytes of working sets; there must be room for the first. `memory` is the
    most that the pool may be; any size if not given.

    Raises:
        OutOfMemoryError: The device has no room for the first.
    """
    bound = max(sizes) + EVICTING_BYTES if memory is None else memory
    useful = sorted({n for n in sizes if sizes[0] <= n <= bound}, reverse=True)
    with closing(_pool(backend.device, useful, bound)) as pool:
        yield ColdBench(backend, pool, rule)


def _pool(device: Device, sizes: Sequence[int], bound: int) -> Pool:
    """Of the first size that the device has room for, with bytes to evict caches."""
    for nbytes in sizes:
        with suppress(OutOfMemoryError):
            return Pool(device, min(bound, nbytes + EVICTING_BYTES), _NAME)
    return Pool(device, sizes[-1], _NAME)


def link_rates(device: Device, buffer: Array, tier: Tier) -> tuple[float, float]:
    """Bytes a millisecond to a tier and from it, of copies of a buffer that fill it."""
    nbytes = buffer.nbytes
    copies = tier.nbytes // nbytes
    hosts = [tier.view(i * nbytes, nbytes) for i in range(copies)]
    rule = StoppingRule(min_samples=3, max_samples=5)
    copier = tier.copier(device)

    def out() -> None:
        copier.wait([copier.out(buffer, host) for host in hosts][-1])

    def back() -> None:
        copier.wait([copier.back(host, buffer) for host in hosts][-1])

    try:
        taken_ms = [measure(run, device, rule).time_ms for run in (out, back)]
    finally:
        copier.close()
    out_rate, in_rate = (copies * nbytes / max(ms, 1e-9) for ms in taken_ms)
    return out_rate, in_rate
