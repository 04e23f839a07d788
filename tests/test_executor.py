import math
import time
import weakref
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.device import CpuCopier, CpuDevice, DiskTier
from mucudnn.backends.null import NullConv, NullKernels
from mucudnn.backends.virtual import VirtualArray, VirtualDevice
from mucudnn.errors import BackendError, OutOfMemoryError, ScheduleError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.tensor import Role
from mucudnn.passes.placement.layout import Layout, lay_out
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.executor.tasks import Pending
from mucudnn.runtime.executor.tiers import HostTier, Tiers
from mucudnn.runtime.profiling.links import LINK_BYTES, cold_bench
from tests.doubles import QUICK, without_collection
from tests.examples import examples
from tests.graphs import NETWORKS
from tests.race_detector import RaceDetector, RaceError
from tests.schedule_oracle import verify
from tests.swapping import Bench, random_network, same

SCHEDULERS = ("on_demand", "timed")


class LazyCopier:
    """Copies as late as it may: when somebody waits."""

    def __init__(self):
        self.jobs = []
        self.done = 0

    def prebind(self, way, source, target):
        def start(after=()):
            self.jobs.append((source, target, way, tuple(after)))
            return len(self.jobs) - 1

        return start

    def wait(self, ticket):
        if self.jobs[ticket] is None:
            return
        source, target, lane, after = self.jobs[ticket]
        for i, job in enumerate(self.jobs[:ticket]):
            if job is not None and (job[2] == lane or i in after):
                self.wait(i)
        np.copyto(target, source)
        self.jobs[ticket] = None
        self.done += 1

    def finish(self):
        for i in range(len(self.jobs)):
            self.wait(i)
        self.jobs.clear()

    def close(self):
        self.jobs.clear()


class Device(CpuDevice):
    """The CPU with copiers of a test's choice."""

    def __init__(self, make):
        self.make = make
        self.copiers = []

    def copier(self):
        self.copiers.append(self.make())
        return self.copiers[-1]


def with_copier(bench, make):
    backend = replace(bench.backend, device=Device(make))
    return replace(bench, backend=backend)


def assert_ends(copying_threads):
    deadline = time.monotonic() + 300
    while copying_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not copying_threads()


def assert_goes_on(bench, executor, state, start):
    """After a step that failed: the next ones are as if it had never begun."""
    state.load(start)
    found = [executor.run(bench.feeds(step)) for step in range(2)]
    same((found, state.save()), bench.run(bench.kept()))
    executor.close()


def without_waits(schedule, kinds):
    """A schedule that does not wait for copies of one direction."""
    moving, kept = {}, []
    for instruction in schedule.instructions:
        match instruction:
            case SwapOut(name) | SwapIn(name):
                moving[name] = type(instruction)
            case Wait(name) if moving.get(name) in kinds:
                continue
        kept.append(instruction)
    return replace(schedule, instructions=tuple(kept))


def count(schedule, kind):
    return sum(isinstance(i, kind) for i in schedule.instructions)


@pytest.fixture(scope="module")
def lenet():
    return Bench.of_model("lenet", 4, 16)


@pytest.fixture(scope="module")
def resnet():
    return Bench.of_model("resnet20", 2, 8)


@pytest.fixture(scope="module")
def expected(resnet):
    return resnet.run(resnet.kept())


@pytest.fixture(scope="module")
def swapped(resnet):
    """A schedule with many copies."""
    plan = resnet.plan(resnet.random_residency(0), scheduler="on_demand")
    assert count(plan.schedule, SwapOut) > 30
    return plan.schedule


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "inception" else ())
        for name in NETWORKS
    ],
)
@pytest.mark.parametrize("make", [CpuCopier, LazyCopier])
def test_small_networks_compute_the_same_bits(network, scheduler, make):
    bench = Bench.of(NETWORKS[network]())
    expected = bench.run(bench.kept())
    moved = 0
    lazy = with_copier(bench, make)
    for seed, part in enumerate((0, 0.2, 0.6)):
        plan = bench.plan(bench.random_residency(seed), part=part, scheduler=scheduler)
        same(lazy.run(plan.schedule, watcher=RaceDetector()), expected)
        moved += count(plan.schedule, SwapIn)
    assert moved > 2


@pytest.mark.parametrize("make", [CpuCopier, LazyCopier])
def test_memory_that_is_freed_under_a_copy_is_waited_for(
    resnet, expected, swapped, make
):
    schedule = without_waits(swapped, [SwapOut])
    with pytest.raises(ScheduleError, match="being copied"):
        verify(schedule)
    bench = with_copier(resnet, make)
    same(bench.run(schedule, watcher=RaceDetector()), expected)
    same(bench.run(schedule), expected)


def test_a_wait_that_is_missing_or_for_nothing_is_an_error(resnet, swapped):
    schedule = without_waits(swapped, [SwapIn])
    with pytest.raises(ScheduleError, match=r"Compute\(.*reads .* while SwapIn\("):
        resnet.executor(schedule)
    instructions = (*swapped.instructions, Wait(swapped.instructions[0].tensor))
    with pytest.raises(ScheduleError, match="no copy is running"):
        resnet.executor(replace(swapped, instructions=instructions))


def test_the_check_finds_waits_that_binding_forgot(resnet, swapped, monkeypatch):
    monkeypatch.setattr(Pending, "touching", lambda self, part: [])
    monkeypatch.setattr(Pending, "writing", lambda self, part: [])
    bench = with_copier(resnet, LazyCopier)
    forgotten = without_waits(swapped, [SwapOut])
    with pytest.raises(RaceError, match=r"\(.*not ordered after Swap.*\("):
        bench.run(forgotten, watcher=RaceDetector())
    unread = without_waits(swapped, [SwapIn])
    with pytest.raises(RaceError, match=r"reads .*not ordered after SwapIn"):
        bench.run(unread, watcher=RaceDetector())


def test_the_check_finds_what_was_overwritten(lenet):
    kept = lenet.kept()
    layout = lay_out(kept)
    computes = [i.node for i in kept.instructions if isinstance(i, Compute)]
    first = kept.graph.storages[kept.graph.by_name[computes[0]].outputs[0]]
    bad = replace(
        layout,
        offsets={
            name: tuple(layout.offsets[first][0] for _ in offsets)
            for name, offsets in layout.offsets.items()
        },
    )
    executor, _ = lenet.executor(kept, watcher=RaceDetector(), layout=bad)
    with pytest.raises(RaceError, match="has overwritten since"):
        executor.run(lenet.feeds())


def test_a_checked_run_reads_no_memory_that_was_freed(lenet):
    """A node that looks elsewhere than it should finds no number."""
    kept = lenet.kept()
    layout = lay_out(kept)
    arena = np.zeros(layout.nbytes, np.uint8)
    detector = RaceDetector()
    executor, state = lenet.executor(kept, watcher=detector, arena=arena)
    feeds = lenet.feeds()
    executor.run(feeds)
    allocated = [i.tensor for i in kept.instructions if isinstance(i, Alloc)]
    spoilt = {task.label for task in detector.tasks}
    assert all((f"Alloc({name})" in spoilt) != (name in feeds) for name in allocated)
    assert np.isfinite(state["conv/weight"]).all()
    live = {kept.graph.storages[name] for name in kept.graph.outputs}
    used = np.zeros(layout.nbytes, bool)
    for name in live:
        offset = layout.offsets[name][-1]
        used[offset : offset + kept.graph.tensors[name].nbytes] = True
    for i in kept.instructions:
        match i:
            case Free(name):
                offset = layout.offsets[name][-1]
                nbytes = kept.graph.tensors[name].nbytes
                part = slice(offset, offset + nbytes)
                assert (arena[part][~used[part]] == 0xFF).all()


def check_layout(schedule):
    """Nothing that is needed at one time overlaps; places are within the arena."""
    layout = lay_out(schedule)
    graph, end = schedule.graph, len(schedule.instructions)
    results = {graph.storages[name] for name in graph.outputs}
    fed = {spec.name for spec in graph.with_role(Role.INPUT)}
    intervals, blocks = {(name, 0): (-1, end) for name in schedule.live_across}, []
    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case Alloc(name):
                number = len([s for s in intervals if s[0] == name])
                first = -1 if number == 0 and name in fed else at
                intervals[name, number] = (first, end)
            case Free(name) if name not in results:
                key = max(s for s in intervals if s[0] == name)
                intervals[key] = (intervals[key][0], at)
            case Compute(name) if schedule.workspaces.get(name):
                offset = layout.workspace_offsets[name]
                blocks.append((at, at, offset, schedule.workspaces[name]))
    for (name, number), (first, last) in intervals.items():
        offset = layout.offsets[name][number]
        blocks.append((first, last, offset, graph.tensors[name].nbytes))
    for i, (a, b, low, nbytes) in enumerate(blocks):
        assert low % 512 == 0
        assert low + nbytes <= layout.nbytes
        for c, d, other, size in blocks[:i]:
            apart = b < c or d < a
            assert apart or low + nbytes <= other or other + size <= low
    for name in schedule.live_across:
        assert layout.offsets[name][0] == layout.offsets[name][-1]
    return layout


@pytest.mark.parametrize("seed", range(4))
def test_a_layout_gives_every_stay_its_own_place(resnet, seed):
    plan = resnet.plan(resnet.random_residency(seed), part=0.1 * seed)
    layout = check_layout(plan.schedule)
    assert plan.peak_bytes == layout.live_peak + resnet.state_bytes(plan.schedule)
    most = 1.3 if plan.schedule.live_across else 1.05
    assert layout.live_peak <= layout.nbytes <= most * layout.live_peak
    assert any(len(set(offsets)) > 1 for offsets in layout.offsets.values())


def test_host_bytes_are_used_again(cpu):
    """Two tensors that are away one after the other share their place."""
    g = GraphBuilder()
    x = g.input("x", (100,))
    first = g.relu(x)
    second = g.scale(first, 2.0)
    third = g.add(g.scale(second, 3.0), first)
    graph = g.build(g.add(g.scale(third, 0.5), second))
    a, b, c, d, e, f = (node.name for node in graph.nodes)
    u, v, w, y, z, out = (node.outputs[0] for node in graph.nodes)
    assert (u, v) == (first, second)
    trip = [SwapOut, Wait, Free, Alloc, SwapIn, Wait]
    instructions = (
        *(Alloc(x), Alloc(u), Compute(a), Free(x), Alloc(v), Compute(b)),
        *(kind(u) for kind in trip),
        *(Alloc(w), Compute(c), Alloc(y), Compute(d), Free(u), Free(w)),
        *(kind(v) for kind in trip),
        *(Alloc(z), Compute(e), Free(y), Alloc(out), Compute(f), Free(z), Free(v)),
    )
    schedule = Schedule(graph, instructions, {}, 1600)
    assert verify(schedule) == 1600
    for make in (CpuCopier, LazyCopier):
        backend = replace(cpu, device=Device(make))
        executor = Executor(
            backend, schedule, lay_out(schedule), {}, {}, watcher=RaceDetector()
        )
        assert executor.host_bytes == 512
        x = np.linspace(-1, 1, 100, dtype=np.float32)
        found = executor.run({"x": x})[graph.outputs[0]]
        r = np.maximum(x, 0)
        np.testing.assert_allclose(found, 0.5 * (6 * r + r) + 2 * r, rtol=1e-6)
        executor.close()


def test_what_does_not_fit_in_host_memory_goes_to_disk(
    resnet, expected, swapped, tmp_path
):
    device = resnet.backend.device
    executor, _ = resnet.executor(swapped)
    half = executor.host_bytes // 2
    tiers = Tiers([HostTier(device, half), DiskTier(executor.host_bytes, tmp_path)])
    detector = RaceDetector()
    executor, state = resnet.executor(swapped, host=tiers, watcher=detector)
    found = [executor.run(resnet.feeds(step)) for step in range(2)]
    spaces = {task.writes[0].space for task in detector.tasks if task.copy}
    assert spaces == {"device", "tier 0", "tier 1"}
    same((found, state.save()), expected)
    executor.close()
    with pytest.raises(OutOfMemoryError, match="that are offloaded"):
        resnet.executor(swapped, host=Tiers([HostTier(device, half)]))


def test_what_moves_nothing_has_no_copier_and_no_host_memory(lenet):
    bench = with_copier(lenet, CpuCopier)
    detector = RaceDetector()
    executor, _ = bench.executor(bench.kept(), watcher=detector)
    executor.run(bench.feeds())
    assert executor.host_bytes == 0
    assert not bench.backend.device.copiers
    assert not any(t.copy or t.waits_for is not None for t in detector.tasks)
    assert [t.node for t in detector.tasks if t.node] == [
        node.name for node in bench.kept().graph.nodes if node.op != "reshape"
    ]


@pytest.mark.parametrize("watcher", [None, RaceDetector()])
def test_a_copy_back_waits_for_who_is_still_leaving_its_place(cpu, watcher):
    g = GraphBuilder()
    x = g.input("x", (100,))
    u = g.relu(x)
    v, w = g.scale(u, 2.0), g.scale(u, 3.0)
    graph = g.build(g.add(v, w))
    a, b, c, d = (node.name for node in graph.nodes)
    (out,) = graph.outputs
    instructions = (
        *(Alloc(x), Alloc(u), Compute(a), Alloc(v), Compute(b)),
        *(SwapOut(v), Wait(v), Free(v), Alloc(w), Compute(c)),
        *(SwapOut(u), Free(u), Alloc(v), SwapIn(v), Wait(v)),
        *(Alloc(out), Compute(d), Free(v), Free(w), Free(x)),
    )
    schedule = Schedule(graph, instructions, {}, 2000)
    places = {x: (0,), u: (512,), v: (1024, 512), w: (1536,), out: (2048,)}
    backend = replace(cpu, device=Device(LazyCopier))
    tier = HostTier(backend.device, 4096)
    layout = Layout(places, {}, 2560, 2560)
    host = Tiers([tier])
    executor = Executor(backend, schedule, layout, {}, {}, host=host, watcher=watcher)
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    r = np.maximum(values, 0)
    np.testing.assert_array_equal(executor.run({"x": values})[out], 2 * r + 3 * r)
    slots = tier.view(0, 2 * 512).view(np.float32).reshape(2, 128)[:, :100]
    assert any((slot == r).all() for slot in slots)


@pytest.mark.parametrize("watcher", [None, RaceDetector()])
def test_a_workspace_waits_for_who_is_still_leaving_its_place(cpu, watcher):
    g = GraphBuilder()
    x = g.input("x", (100,))
    u, v = g.scale(x, 2.0), g.scale(x, 3.0)
    graph = g.build(g.add(u, v))
    a, b, c = (node.name for node in graph.nodes)
    (out,) = graph.outputs
    instructions = (
        *(Alloc(x), Alloc(u), Compute(a), SwapOut(u), Free(u)),
        *(Alloc(v), Compute(b)),  # its workspace is where u was
        *(Alloc(u), SwapIn(u), Wait(u), Alloc(out), Compute(c)),
    )
    schedule = Schedule(graph, instructions, {b: 400}, 2000)
    places = {x: (0,), u: (512, 512), v: (1024,), out: (1536,)}
    layout = Layout(places, {b: 512}, 2048, 2048)
    scale = cpu.kernels["scale"]

    def run(inputs, outputs, attrs, workspace):
        scale.run(inputs, outputs, attrs, None)
        if workspace is not None:
            workspace[:] = 0xFF

    kernels = {**cpu.kernels, "scale": Kernel(run)}
    backend = replace(cpu, device=Device(LazyCopier), kernels=kernels)
    executor = Executor(backend, schedule, layout, {}, {}, watcher=watcher)
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    result = executor.run({"x": values})[out]
    np.testing.assert_array_equal(result, 2 * values + 3 * values)


def test_copies_that_nobody_waits_for_end_with_the_step(cpu):
    g = GraphBuilder()
    x = g.input("x", (100,))
    graph = g.build(g.relu(x))
    (out,) = graph.outputs
    instructions = (Alloc(x), Alloc(out), Compute(graph.nodes[0].name), SwapOut(out))
    schedule = Schedule(graph, instructions, {}, 800)
    backend = replace(cpu, device=Device(LazyCopier))
    executor = Executor(
        backend, schedule, lay_out(schedule), {}, {}, watcher=RaceDetector()
    )
    for step in range(2):
        executor.run({"x": np.ones(100, np.float32)})
        assert backend.device.copiers[0].done == step + 1


def null_bench(training, out_rate, in_rate):
    """A bench whose profile is what the null backend takes."""
    device = VirtualDevice()
    device.rates = {"out": Fraction(out_rate), "back": Fraction(in_rate)}
    backend = Backend("null", device, NullConv(device), kernels=NullKernels(device))
    bench = Bench.of(training, backend, rates=(out_rate, in_rate))
    for name, plan in bench.plans.items():
        timed = []
        for step in plan.steps:
            single = replace(
                plan.problem, x_shape=(step.batch, *plan.problem.x_shape[1:])
            )
            start = device.now_ms
            backend.bind(type(plan)(single, (step,))).run(
                None, None, None, device.allocate(step.workspace), False
            )
            timed.append(replace(step, time_ms=device.now_ms - start))
        bench.plans[name] = type(plan)(plan.problem, tuple(timed))
    bench.profile = replace(
        bench.profile, fronts={name: (plan,) for name, plan in bench.plans.items()}
    )
    executor, _ = bench.executor(bench.kept())
    _, times = executor.run_timed(bench.feeds())
    node_ms = {node.name: times.get(node.name, 0.0) for node in bench.graph.nodes}
    again_ms = {
        node.name: null_ms(bench, once_more)
        for node in bench.graph.nodes
        if (once_more := node.recompute_node) is not None
    }
    bench.profile = replace(bench.profile, node_ms=node_ms, recompute_ms=again_ms)
    return bench


def null_ms(bench, node):
    """What the null backend takes for one node."""
    device = bench.backend.device
    start = device.now_ms
    inputs, outputs = (
        [
            VirtualArray(spec.shape, spec.dtype)
            for spec in map(bench.graph.tensors.get, names)
        ]
        for names in (node.inputs, node.outputs)
    )
    bench.backend.kernels[node.op].run(inputs, outputs, node.attrs, None)
    return device.now_ms - start


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_null_step_takes_what_was_predicted(network, scheduler):
    bench = null_bench(NETWORKS[network](), 90, 140)
    device = bench.backend.device
    stalled = 0.0
    for seed in range(4):
        plan = bench.plan(
            bench.random_residency(seed), part=0.1 * seed, scheduler=scheduler
        )
        executor, _ = bench.executor(plan.schedule)
        for step in range(3 if plan.schedule.live_across else 0):
            executor.run(bench.feeds(step))
        for step in range(2):
            start = device.record()
            executor.run(bench.feeds(step))
            taken = device.elapsed_ms(start, device.record())
            assert math.isclose(taken, plan.prediction.step_ms, rel_tol=1e-9)
        stalled += sum(plan.prediction.stalls_ms.values())
        assert plan.prediction.step_ms >= plan.prediction.compute_ms
    assert stalled > 0


def test_a_timed_run_tells_the_time_of_nodes_alone(resnet, swapped):
    bench = null_bench(NETWORKS["residual"](), 90, 140)
    plan = bench.plan(bench.random_residency(4), scheduler="on_demand")
    assert plan.prediction.stalls_ms["memory"] > 0
    executor, _ = bench.executor(plan.schedule)
    _, times = executor.run_timed(bench.feeds())
    for name, ms in times.items():
        expected = bench.plans[name].time_ms if name in bench.plans else None
        known = expected or bench.profile.node_ms[name]
        assert math.isclose(ms, known, rel_tol=1e-9)


def failing_after(copies):
    left = [copies]

    def copy(source, target):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "the link is down")
        np.copyto(target, source)

    return copy


def test_a_failing_copy_ends_the_step_and_the_next_one_runs(lenet, copying_threads):
    plan = lenet.plan(lenet.random_residency(4), scheduler="on_demand")
    swaps = 2 * count(plan.schedule, SwapOut)
    for copies in range(0, swaps - 1, 2):
        copies_of = [failing_after(copies), None, None]
        bench = with_copier(lenet, lambda: CpuCopier(copies_of.pop(0)))  # noqa: B023
        executor, state = bench.executor(plan.schedule)
        start = state.save()
        with pytest.raises(BackendError, match=r"copy .* failed.*link is down"):
            executor.run(bench.feeds())
        assert_ends(copying_threads)
        assert_goes_on(lenet, executor, state, start)
        assert_ends(copying_threads)


class Interrupted(dict):
    """Kernels of which one presses Ctrl-C."""

    def __init__(self, kernels, at):
        super().__init__(kernels)
        self.left = at

    def get(self, op, default=None):
        kernel = super().get(op, default)

        def run(*arguments):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            kernel.run(*arguments)

        return None if kernel is None else Kernel(run, kernel.workspace)


def slow(source, target):
    time.sleep(0.001)
    np.copyto(target, source)


@pytest.mark.parametrize("at", [2, 9, 20])
def test_ctrl_c_in_the_middle_of_a_step(lenet, at, copying_threads):
    plan = lenet.plan(lenet.random_residency(4), scheduler="timed")
    bench = with_copier(lenet, lambda: CpuCopier(slow))
    kernels = Interrupted(lenet.backend.kernels, at)
    bench = replace(bench, backend=replace(bench.backend, kernels=kernels))
    executor, state = bench.executor(plan.schedule)
    start = state.save()
    with pytest.raises(KeyboardInterrupt):
        executor.run(bench.feeds())
    assert not copying_threads()
    assert_goes_on(lenet, executor, state, start)
    assert not copying_threads()


def test_memory_is_free_when_the_executor_is_gone(lenet, tmp_path, copying_threads):
    plan = lenet.plan(lenet.random_residency(4), scheduler="timed")
    device = lenet.backend.device
    arena = device.allocate(lay_out(plan.schedule).nbytes)
    disk = DiskTier(1 << 20, tmp_path)
    executor, state = lenet.executor(plan.schedule, arena=arena, host=Tiers([disk]))
    executor.run(lenet.feeds())
    gone = weakref.ref(arena)
    with without_collection():
        del arena, disk, executor, state
        assert_ends(copying_threads)
        assert gone() is None


@given(st.integers(0, 1 << 16), st.floats(0, 1), st.sampled_from(SCHEDULERS))
@examples(40)
def test_random_networks_compute_the_same_bits_in_any_budget(seed, part, scheduler):
    bench = Bench.of(random_network(seed))
    plan = bench.plan(bench.random_residency(seed), part=part, scheduler=scheduler)
    layout = check_layout(plan.schedule)
    assert layout.live_peak + bench.state_bytes(plan.schedule) <= plan.budget
    expected = bench.run(bench.kept())
    same(bench.run(plan.schedule, watcher=RaceDetector()), expected)
    lazy = with_copier(bench, LazyCopier)
    same(
        lazy.run(without_waits(plan.schedule, [SwapOut]), watcher=RaceDetector()),
        expected,
    )


def test_the_null_backend_knows_its_link():
    with cold_bench(get_backend("null"), [0], LINK_BYTES, QUICK) as bench:
        assert bench.link() == (1 << 24, 1 << 24)
    with cold_bench(get_backend("cpu"), [0], 1 << 20, QUICK) as bench:
        assert all(rate > 1e4 for rate in bench.link())
