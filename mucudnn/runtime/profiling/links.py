"""Cold timing of kernels, and measured rates of links and mappings.

All device memory is one allocation: operands, workspaces, the buffer whose writing
evicts the caches before every run, and the buffer that is copied to measure the link.
So measuring stays within a budget in bytes, and kernels see memory as in an arena.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from mucudnn.backends import Device, get_backend
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Array, Buffer, Start, Tier
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import ChunkCosts, MemoryTier, Profile
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import ITEMSIZE, Role, TensorSpec
from mucudnn.passes.liveness import rounded
from mucudnn.runtime.executor.tiers import HostTier, TierChoice
from mucudnn.runtime.training.sizes import WorkingSet
from mucudnn.runtime.tuning.timing import StoppingRule, measure

EVICTING_BYTES = 64 << 20
"""Exceeds the caches of a processor or a GPU."""

LINK_BYTES = 64 << 20
"""Large enough that the launch overhead of a copy is negligible."""

_COPIES = 64


class ColdBench:
    """A benchmark of kernels and copies in one buffer that each measurement reuses.

    Args:
        nbytes: Bytes of operands, workspace and evicting buffer together.
    """

    def __init__(self, backend: Backend, nbytes: int, rule: StoppingRule) -> None:
        self._backend = backend
        self._device = backend.device
        self._memory: Buffer = self._device.allocate(nbytes)
        self._nbytes, self._used = nbytes, 0
        self._rule = rule
        self._zeros = np.zeros(min(EVICTING_BYTES, nbytes), np.uint8)

    def close(self) -> None:
        """Free the memory."""
        self._memory = None
        self._device.trim()

    def node_ms(self, graph: Graph, node: Node, workspace: int) -> float:
        """Return the median time of a node with a kernel, without its first run.

        `workspace` is the kernel's workspace in bytes. Convolutions and views are not
        allowed.
        """
        needed = WorkingSet.of_node(graph, node, workspace)
        offsets, scratch = self._placed(needed)
        for spec in needed.operands:
            self._filled(spec, offsets[spec.name])

        def views(specs: Sequence[TensorSpec]) -> list[Array]:
            at = (offsets[graph.storages[spec.name]] for spec in specs)
            return [self._view(*pair) for pair in zip(specs, at, strict=True)]

        reads, writes, attrs = operands_of(graph, node)
        kernel = self._backend.kernels[node.op]
        return self._median(kernel.call(views(reads), views(writes), attrs, scratch))

    def plan_ms(self, plan: ConvPlan) -> float | None:
        """Return a convolution's median time; None if the memory is too small."""
        needed = WorkingSet.of_plan(plan)
        if needed.pool_bytes > self._nbytes:
            return None
        offsets, scratch = self._placed(needed)
        a, b, out = (self._view(s, offsets[s.name]) for s in needed.operands)
        self._device.randomize(a)
        self._device.randomize(b)
        runner = self._backend.bind(plan)
        return self._median(lambda: runner.run(a, b, out, scratch, False))

    def calls_ms(
        self,
        needed: WorkingSet,
        bind_calls: Callable[
            [Sequence[Array], Buffer | None], Sequence[Callable[[], None]]
        ],
    ) -> tuple[float, ...]:
        """Return the median times of calls on tensors of random numbers.

        `bind_calls` makes the calls from the tensors and the workspace of `needed`.
        """
        offsets, scratch = self._placed(needed)
        views = [self._filled(spec, offsets[spec.name]) for spec in needed.operands]
        return tuple(self._median(call) for call in bind_calls(views, scratch))

    def link(self, nbytes: int = LINK_BYTES) -> tuple[float, float]:
        """Return the rates to the host and from it, in bytes a millisecond."""
        size = min(nbytes, self._nbytes)
        if size == 0:
            raise OutOfMemoryError(
                "copies of no bytes cannot be timed; give memory to measure in"
            )
        buffer = self._view(_bytes(size), 0)
        self._device.upload(np.zeros(size, np.uint8), buffer)
        # Less memory is copied several times in a row, from and to different bytes of
        # the host, to amortize launches and avoid cache hits.
        host = HostTier(self._device, min(_COPIES, -(-nbytes // size)) * size)
        return link_rates(self._device, buffer, host)

    def _placed(self, needed: WorkingSet) -> tuple[dict[str, int], Buffer | None]:
        """Return the offset of each tensor, and the workspace."""
        offsets, end = {}, 0
        for spec in needed.tensors:
            if end + spec.nbytes > self._nbytes:
                raise OutOfMemoryError(
                    f"no room for {needed} in the memory for measuring, "
                    f"{format_bytes(self._nbytes, needed.pool_bytes)}"
                )
            offsets[spec.name] = end
            end += rounded(spec.nbytes)
        self._used = min(end, self._nbytes)
        scratch = needed.workspace
        if scratch is None:
            return offsets, None
        return offsets, self._view(scratch, offsets[scratch.name])

    def _view(self, spec: TensorSpec, offset: int) -> Array:
        return self._device.view(self._memory, offset, spec)

    def _filled(self, spec: TensorSpec, offset: int) -> Array:
        """Return a tensor of random numbers; labels and optimizer state are zeros."""
        array = self._view(spec, offset)
        if spec.dtype in ITEMSIZE and spec.role is not Role.STATE:
            self._device.randomize(array)
        else:
            self._device.upload(np.zeros(spec.shape, spec.dtype), array)
        return array

    def _median(self, run: Callable[[], None]) -> float:
        """Return the median time, evicting the caches before each run."""
        device = self._device
        run()
        samples: list[float] = []
        # Writing a large buffer evicts the operands, as other nodes of a step would.
        nbytes = min(EVICTING_BYTES, self._nbytes - self._used)
        buffer = self._view(_bytes(nbytes), self._used)
        while not self._rule.enough(samples):
            if nbytes:
                device.upload(self._zeros[:nbytes], buffer)
            start = device.begin()
            run()
            samples.append(device.elapsed_ms(start, device.record()))
        return statistics.median(samples)


def _bytes(nbytes: int) -> TensorSpec:
    return TensorSpec("bytes", (nbytes,), "uint8")


@contextmanager
def cold_bench(
    backend: Backend, sizes: Sequence[int], memory: int | None, rule: StoppingRule
) -> Iterator[ColdBench]:
    """Open a bench with memory for the largest working set that fits the device.

    `sizes` are bytes of working sets; the first one must fit. `memory` limits the
    bench's size in bytes; None does not.
    """
    bound = max(sizes) + EVICTING_BYTES if memory is None else memory
    fitting = sorted({n for n in sizes if sizes[0] <= n <= bound}, reverse=True)
    for nbytes in fitting:
        with suppress(OutOfMemoryError):
            bench = ColdBench(backend, min(bound, nbytes + EVICTING_BYTES), rule)
            break
    else:
        bench = ColdBench(backend, fitting[-1], rule)
    with closing(bench):
        yield bench


def link_rates(device: Device, buffer: Array, tier: Tier) -> tuple[float, float]:
    """Return the rates to a tier and from it, in bytes a millisecond."""
    nbytes = buffer.nbytes
    copies = tier.nbytes // nbytes
    hosts = [tier.view(i * nbytes, nbytes) for i in range(copies)]
    rule = StoppingRule(min_samples=3, max_samples=5)
    copier = tier.copier(device)

    def run(starts: Sequence[Start]) -> None:
        # Copies of a queue run in order, so waiting for the last one is enough.
        copier.wait([start() for start in starts][-1])

    try:
        ways = (
            [copier.prebind("out", buffer, host) for host in hosts],
            [copier.prebind("back", host, buffer) for host in hosts],
        )
        runs = (partial(run, starts) for starts in ways)
        taken_ms = [measure(each, device, rule).time_ms for each in runs]
    finally:
        copier.close()
    out_rate, in_rate = (copies * nbytes / max(ms, 1e-9) for ms in taken_ms)
    return out_rate, in_rate


# Rates of the links to offload targets, where the user does not give them.
#
# On the CPU, links are measured, as in training. For a device that is not present, the
# rate to host memory is the published one of its profile. A peer device gets the same
# rate, as in the worst case copies between devices use the same bus. A folder is
# measured on this machine and limited to that rate. A rate given by the user takes
# precedence.


def measured_tiers(
    device: Device, choices: Sequence[TierChoice], memory: int
) -> tuple[MemoryTier, ...]:
    """Measure the links to offload targets; return tiers for planning.

    At most `memory` bytes of the device are allocated meanwhile.
    """
    found = []
    for choice in choices:
        room, rate = choice.room(), choice.bytes_per_ms
        if rate is not None:
            found.append(_tier(choice, room, rate, rate))
            continue
        # The file for measuring takes room itself, so it uses half of the free space.
        spare = room / 2 if choice.kind == "disk" else room
        size = max(1, int(min(LINK_BYTES, memory, spare)))
        spec = TensorSpec("the link's buffer", (size,), "uint8")
        with closing(choice.open(device, size)) as tier:
            buffer = device.view(device.allocate(size), 0, spec)
            device.upload(np.zeros(spec.shape, np.uint8), buffer)
            found.append(_tier(choice, room, *link_rates(device, buffer, tier)))
    return tuple(found)


def forecast_tiers(
    choices: Sequence[TierChoice], profile: Profile, *, measured: bool
) -> tuple[MemoryTier, ...]:
    """Estimate the links to offload targets; return tiers for planning.

    `profile` has the rates to host memory. Links are only `measured` where the step
    runs on this machine's CPU.
    """
    if measured:
        return measured_tiers(get_backend("cpu").device, choices, LINK_BYTES)
    out_rate, in_rate = profile.out_bytes_per_ms, profile.in_bytes_per_ms
    found = []
    for choice in choices:
        if choice.bytes_per_ms is None and choice.kind != "disk":
            found.append(_tier(choice, choice.room(), out_rate, in_rate))
            continue
        (tier,) = measured_tiers(get_backend("cpu").device, [choice], LINK_BYTES)
        # A copy to a disk of this machine passes the device's link as well.
        if choice.bytes_per_ms is None:
            tier = replace(
                tier,
                out_bytes_per_ms=min(tier.out_bytes_per_ms, out_rate),
                in_bytes_per_ms=min(tier.in_bytes_per_ms, in_rate),
            )
        found.append(tier)
    return tuple(found)


def _tier(
    choice: TierChoice, room: float, out_rate: float, in_rate: float
) -> MemoryTier:
    """Return a tier for planning; rates are in bytes a millisecond."""
    return MemoryTier(
        name=str(choice),
        nbytes=room,
        out_bytes_per_ms=out_rate,
        in_bytes_per_ms=in_rate,
        addressable=choice.addressable,
    )


_CHUNKS = 64

_SAMPLES = 5


def mapping_costs(backend: Backend, memory: int | None = None) -> ChunkCosts:
    """Time the mapping and unmapping of non-contiguous chunks.

    At most `memory` bytes are allocated meanwhile; if they are less than a chunk,
    nothing is timed.
    """
    mapper, device = backend.mapper, backend.device
    if mapper is None:
        raise UnsupportedError(
            f"backend {backend.name!r} cannot map memory; use the static placement"
        )
    size = mapper.chunk_bytes
    count = _CHUNKS if memory is None else min(_CHUNKS, memory // size)
    if count < 1:
        return ChunkCosts(size)
    chunks = range(count - 1, -1, -1)  # descending: no two merge into one mapping
    held = mapper.allocate(count)
    rows = [held.map(chunks)]

    def timed(work: Callable[[], object]) -> float:
        start = device.record()
        work()
        return device.elapsed_ms(start, device.record()) / count

    times = [
        (timed(lambda: rows.append(held.map(chunks))), timed(rows.pop))
        for _ in range(_SAMPLES)
    ]
    maps, unmaps = zip(*times, strict=True)
    return ChunkCosts(size, statistics.median(maps), statistics.median(unmaps))
