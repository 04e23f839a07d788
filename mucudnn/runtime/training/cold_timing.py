"""Time a kernel as a step finds it: its operands made long ago, out of the caches.

All device memory comes from one buffer: operands and workspaces, the bytes whose
writing evicts the caches before every run, and those that are copied to measure the
link. So measuring keeps a budget, and kernels see memory as they do in an arena.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import numpy as np

from mucudnn.backends.base import Array, Backend, Buffer, Device
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import ITEMSIZE, Role, TensorSpec
from mucudnn.passes.liveness import rounded
from mucudnn.runtime.training.sizes import WorkingSet
from mucudnn.runtime.tuning.timing import StoppingRule, measure

__all__ = [
    "EVICTING_BYTES",
    "LINK_BYTES",
    "ColdBench",
    "MeasuringMemory",
    "cold_bench",
]

EVICTING_BYTES = 64 << 20
"""More than the caches of a processor hold, and of a GPU."""

LINK_BYTES = 64 << 20
"""Large enough that starting a copy takes no time beside it."""

_COPIES = 64


class MeasuringMemory:
    """One buffer of a device; what is taken of it last is given back first.

    Attributes:
        nbytes: Its size.
        left: Bytes that nothing has taken.

    Raises:
        OutOfMemoryError: The device has no room for it.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = self.left = nbytes
        self._device = device
        self._buffer: Buffer | None = device.allocate(nbytes)

    @contextmanager
    def holding(self, specs: Iterable[TensorSpec]) -> Iterator[Callable[..., Array]]:
        """Have tensors during a `with`, which gets what makes views of their bytes.

        `view(spec)` is a tensor, and `view(spec, name)` another in the bytes of `name`.

        Raises:
            OutOfMemoryError: Too little is left.
        """
        before, starts = self.left, dict[str, int]()

        def view(spec: TensorSpec, name: str | None = None) -> Array:
            return self._device.view(self._buffer, starts[name or spec.name], spec)

        try:
            for spec in specs:
                if spec.nbytes > self.left:
                    raise OutOfMemoryError(
                        f"no room for {spec.name!r} of {format_bytes(spec.nbytes)} in "
                        f"{format_bytes(self.nbytes)} for measuring: "
                        f"{format_bytes(self.left)} are left"
                    )
                starts[spec.name] = self.nbytes - self.left if spec.nbytes else 0
                self.left = max(0, self.left - rounded(spec.nbytes))
            yield view
        finally:
            self.left = before

    def close(self) -> None:
        """Free it, once no view is left."""
        self._buffer = None
        self._device.trim()


class ColdBench:
    """Times kernels and copies in a memory of which nothing is taken in between."""

    def __init__(
        self, backend: Backend, memory: MeasuringMemory, rule: StoppingRule
    ) -> None:
        self._backend = backend
        self._device = backend.device
        self._memory = memory
        self._rule = rule
        self._zeros = np.zeros(min(EVICTING_BYTES, memory.nbytes), np.uint8)

    def node_ms(self, graph: Graph, node: Node, nbytes: int) -> float:
        """Median time of a node that has a kernel; its first run does not count.

        `nbytes` is the workspace its kernel asks for; it is no convolution or view.

        Raises:
            OutOfMemoryError: The memory does not hold its tensors.
        """
        needed = WorkingSet.of_node(graph, node, nbytes)
        run, scratch = self._backend.kernels[node.op].run, needed.workspace
        with self._memory.holding(needed.tensors) as view:
            for spec in needed.operands:
                self._fill(spec, view(spec))

            def views(names: Sequence[str]) -> list[Array]:
                return [view(graph.tensors[n], graph.storages[n]) for n in names]

            inputs, outputs = views(node.inputs), views(node.outputs)
            workspace = None if scratch is None else view(scratch)
            return self._median(lambda: run(inputs, outputs, node.attrs, workspace))

    def plan_ms(self, plan: ConvPlan) -> float | None:
        """Median time of a convolution; None where the memory does not hold it."""
        needed = WorkingSet.of_plan(plan)
        if needed.pool_bytes > self._memory.nbytes:
            return None
        with self._memory.holding(needed.tensors) as view:
            a, b, out = map(view, needed.operands)
            self._device.randomize(a)
            self._device.randomize(b)
            scratch = None if needed.workspace is None else view(needed.workspace)
            runner = self._backend.bind(plan)
            return self._median(lambda: runner.run(a, b, out, scratch, False))

    def link(self, nbytes: int = LINK_BYTES) -> tuple[float, float]:
        """Bytes a millisecond to the host and from it.

        In less memory several copies follow one another, from and to different bytes
        of the host, so that starting them and caches count less.

        Raises:
            OutOfMemoryError: There is not a single byte.
        """
        size = min(nbytes, self._memory.nbytes)
        if size == 0:
            raise OutOfMemoryError("copies of no bytes cannot be timed; give some")
        spec = TensorSpec("the link's buffer", (size,), "uint8")
        with self._memory.holding([spec]) as view:
            buffer = view(spec)
            self._device.upload(np.zeros(spec.shape, np.uint8), buffer)
            return _rates(self._device, buffer, min(_COPIES, -(-nbytes // size)))

    def _fill(self, spec: TensorSpec, array: Array) -> None:
        """Random numbers, or zeros where numbers mean something.

        Such as labels, and sums of squares in the state.
        """
        if spec.dtype in ITEMSIZE and spec.role is not Role.STATE:
            self._device.randomize(array)
        else:
            self._device.upload(np.zeros(spec.shape, spec.dtype), array)

    def _median(self, run: Callable[[], None]) -> float:
        """Median time with what is left evicting the caches before each."""
        device = self._device
        run()
        samples: list[float] = []
        nbytes = min(EVICTING_BYTES, self._memory.left)
        spec = TensorSpec("the evicting buffer", (nbytes,), "uint8")
        with self._memory.holding([spec]) as view:
            buffer = view(spec)
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
    """A bench with memory for the largest working set that there is room for.

    `sizes` are bytes of working sets; there must be room for the first. `memory` is the
    most that it may be; any size if not given.

    Raises:
        OutOfMemoryError: The device has no room for the first.
    """
    bound = max(sizes) + EVICTING_BYTES if memory is None else memory
    useful = sorted({n for n in sizes if sizes[0] <= n <= bound}, reverse=True)
    with closing(_memory(backend.device, useful, bound)) as taken:
        yield ColdBench(backend, taken, rule)


def _memory(device: Device, sizes: Sequence[int], bound: int) -> MeasuringMemory:
    """Of the first size that the device has room for, with bytes to evict caches."""
    for nbytes in sizes:
        with suppress(OutOfMemoryError):
            return MeasuringMemory(device, min(bound, nbytes + EVICTING_BYTES))
    return MeasuringMemory(device, sizes[-1])


def _rates(device: Device, buffer: Array, copies: int) -> tuple[float, float]:
    """Bytes a millisecond, out and in, of so many copies of a buffer."""
    nbytes = buffer.nbytes
    slab = device.host(copies * nbytes)
    hosts = [slab[i * nbytes : (i + 1) * nbytes] for i in range(copies)]
    rule = StoppingRule(min_samples=3, max_samples=5)
    copier = device.copier()

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
