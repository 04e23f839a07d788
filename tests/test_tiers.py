"""State and offloaded tensors in memory of somebody else: the host and other tiers."""

import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu import device as copies
from mucudnn.backends.cpu.device import CpuCopier
from mucudnn.backends.cuda.device import PeerMemory
from mucudnn.errors import BackendError, OutOfMemoryError, PlanningError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam
from mucudnn.ir.profile import MemoryTier, TierPlacement
from mucudnn.ir.schedule import Residency
from mucudnn.passes.placement.layout import host_blocks
from mucudnn.passes.placement.tiers import fill_tiers, place_state
from mucudnn.passes.planning.place_step import place_tiered_step
from mucudnn.passes.planning.plan_step import minimum_budget
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.problem import state_bytes
from mucudnn.passes.simulate import simulate
from mucudnn.runtime.executor.tiers import TierChoice, Tiers, parse_tiers
from mucudnn.runtime.profiling.links import measured_tiers
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from tests.cupy_fake import StrictCupy
from tests.doubles import copied
from tests.swapping import Bench, same
from tests.training_cases import tuner_of

BATCH, SIDE, WIDTH, CLASSES = 4, 8, 256, 3

pytestmark = pytest.mark.usefixtures("short_searches")


def network(*, training=True):
    """Wide dense layers: nearly all of it is parameters and their state."""
    g = GraphBuilder(training=training)
    x = g.relu(g.batch_norm(g.conv(g.input("image", (BATCH, 2, SIDE, SIDE)), 4, 3)))
    x = g.flatten(x)
    for _ in range(4):
        x = g.dropout(g.relu(g.linear(x, WIDTH)), 0.1)
    logits, label = g.linear(x, CLASSES), g.input("label", (BATCH,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


def trainer(budget=None, **options):
    return Trainer(
        network(),
        network(training=False),
        tuner=tuner_of(),
        optimizer=Adam(learning_rate=0.01),
        budget=budget,
        seed=3,
        **options,
    )


class Images:
    """Three batches, the same in every epoch."""

    def __len__(self):
        return 3

    def epoch(self, epoch, start=0):
        for i in range(start, 3):
            rng = np.random.default_rng(i)
            images = rng.standard_normal((BATCH, 2, SIDE, SIDE), dtype="f4")
            yield images, rng.integers(0, CLASSES, BATCH)


@cache
def without_budget():
    """Return the history of training in all memory, and the bytes of its state."""
    made = trainer()
    return history(made), state_bytes(made.graph)


def within(share, **options):
    """A budget that is a share of what parameters and state take alone."""
    nbytes = int(share * without_budget()[1])
    return MemoryBudget(nbytes=nbytes, convolutions="fixed", **options)


def history(made):
    """Steps with evaluations in between."""
    found = []
    for epoch in range(2):
        for images, labels in Images().epoch(epoch):
            found.append(made.step(images, labels))
        found.append(made.evaluate(Images()))
    state = {name: array.tobytes() for name, array in made.state.save().items()}
    made.close()
    return found, state


@pytest.mark.parametrize("scheduler", [None, "timed", "on_demand", "adaptive_window"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_training_and_evaluation_give_the_same_bits(scheduler, where, tmp_path):
    disk = tmp_path if where == "disk" else None
    policy = "planned" if scheduler is None else "paging"
    budget = within(0.6, policy=policy, scheduler=scheduler, disk=disk)
    made = trainer(budget)
    schedule = made.placed.plan.schedule
    assert schedule.hosted
    assert made.peak_bytes <= budget.nbytes < state_bytes(made.graph)
    if scheduler == "timed":
        assert schedule.live_across
    assert history(made) == without_budget()[0]


def test_accumulated_gradients_are_at_home_there_too():
    def accumulated(budget=None):
        made = Trainer(
            network(),
            tuner=tuner_of(),
            optimizer=Adam(learning_rate=0.01),
            budget=budget,
            gradient_accumulation=2,
        )
        rng = np.random.default_rng(0)
        images = rng.standard_normal((2 * BATCH, 2, SIDE, SIDE), dtype="f4")
        found = [made.step(images, np.arange(2 * BATCH) % CLASSES) for _ in range(3)]
        nbytes = state_bytes(made.graph)
        state = {name: array.tobytes() for name, array in made.state.save().items()}
        made.close()
        return found, state, nbytes

    *expected, nbytes = accumulated()
    budget = MemoryBudget(nbytes=int(0.6 * nbytes), convolutions="fixed")
    *found, _ = accumulated(budget)
    assert found == expected


def test_a_checkpoint_goes_from_one_budget_to_another(tmp_path):
    """What is carried on the device when it is written is in it as well."""
    budget = within(0.6, policy="paging", scheduler="timed")
    first = trainer(budget)
    fit(first, Images(), epochs=1, checkpoints=Checkpoints(tmp_path))
    first.close()
    second = trainer()
    checkpoints = Checkpoints(tmp_path)
    fit(second, Images(), epochs=2, checkpoints=checkpoints, resume=checkpoints.load())
    straight = trainer()
    fit(straight, Images(), epochs=2)
    for name, array in straight.state.save().items():
        np.testing.assert_array_equal(second.state.save()[name], array, err_msg=name)
    third = trainer(budget)
    third.state.load(straight.state.save())
    for name, array in straight.state.save().items():
        np.testing.assert_array_equal(third.state.save()[name], array, err_msg=name)


def test_what_is_carried_is_brought_home_before_the_state_is_read():
    made = trainer(within(0.6, policy="paging", scheduler="timed"))
    live_across = made.placed.plan.schedule.live_across
    before = {name: made.state.save()[name] for name in live_across}
    for images, labels in Images().epoch(0):
        made.step(images, labels)
    after = made.state.save()
    changed = [name for name in live_across if (before[name] != after[name]).any()]
    assert changed
    made.close()
    assert made.state.save().keys() == after.keys()


def test_a_step_that_fails_can_go_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    made = trainer(within(0.6, policy="paging", scheduler="timed"))
    checkpoints = Checkpoints(tmp_path)
    fit(made, Images(), epochs=1, checkpoints=checkpoints)
    saved = made.state.save()
    images, labels = next(Images().epoch(0))
    carry, left = copies._copy_chunks, [20]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the host is gone")
        return carry(*arguments)

    def steps():
        for _ in range(3):
            made.step(images, labels)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_copy_chunks", failing)
        with pytest.raises(BackendError, match="the host is gone"):
            steps()
    made.state.load(checkpoints.load().arrays)
    for name, array in saved.items():
        np.testing.assert_array_equal(made.state.save()[name], array, err_msg=name)
    assert np.isfinite(made.step(images, labels).loss)
    made.close()


SHARED = Path("/dev/shm")
needs_segments = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs shared memory in /dev/shm"
)


NO_TIERS = ("", "ram", "host:1", "disk", "disk:", "peer", "peer:", "=3")


def tier(name, nbytes=math.inf, rate=1e6, back=None, **options):
    back = rate if back is None else back
    return MemoryTier(
        name=name, nbytes=nbytes, out_bytes_per_ms=rate, in_bytes_per_ms=back, **options
    )


@pytest.fixture(scope="module")
def bench():
    return Bench.of_model("resnet18", 2, (3, 32, 32))


@pytest.fixture(scope="module")
def plan(bench):
    """All that can leave does, in little memory."""
    return bench.plan(dict.fromkeys(bench.saved(), Residency.OFFLOAD), part=0.1)


def filled(plan, *tiers):
    return fill_tiers(plan.prediction, place_state(plan.schedule, tiers)).placement


def predicted(plan, placement):
    return simulate(plan.schedule, plan.profile, placement)


# --- decided -----------------------------------------------------------------------


def test_one_tier_with_the_profiles_links_changes_nothing(plan):
    known = plan.prediction
    one = tier("host", rate=plan.profile.out_bytes_per_ms)
    found = predicted(plan, filled(plan, one))
    assert (found.step_ms, found.lanes) == (known.step_ms, known.lanes)
    assert found.stalls_ms == known.stalls_ms
    assert found.bound_ms == known.bound_ms


@pytest.mark.parametrize("seed", range(8))
def test_links_of_their_own_never_slow_a_step_down(plan, seed):
    """Whoever goes where, if all links are as fast as the one there was."""
    rate = plan.profile.out_bytes_per_ms
    names = [block.name for block in host_blocks(plan.schedule)]
    tiers = tuple(tier(name, rate=rate) for name in "abc")
    places = {name: (hash((name, seed)) % 3, 0) for name in names}
    found = predicted(plan, TierPlacement(tiers, places, (0, 0, 0)))
    assert found.step_ms <= plan.prediction.step_ms
    assert found.bound_ms <= found.step_ms * (1 + 1e-9)
    assert found.out_bytes == plan.prediction.out_bytes
    assert {lane.tier for lane in found.lanes} == {0, 1, 2}


def test_the_fastest_is_filled_first(plan):
    fast, slow = tier("fast", rate=1e9), tier("slow", rate=1e3)
    all_fast = filled(plan, fast, slow)
    assert all_fast.used[1] == 0
    whole = all_fast.used[0]
    some = filled(plan, tier("fast", whole // 2, 1e9), slow)
    assert 0 < some.used[0] <= whole // 2
    assert some.used[1] > 0
    assert predicted(plan, all_fast).step_ms <= predicted(plan, some).step_ms


def test_two_links_are_better_than_one(plan):
    """Where the fastest is the bottleneck, some storages go to the next."""
    rate = plan.profile.out_bytes_per_ms / 8
    tiers = tier("a", rate=rate), tier("b", rate=rate * 0.9)
    alone = predicted(plan, filled(plan, tiers[0])).step_ms
    both = predicted(plan, filled(plan, *tiers))
    assert {lane.tier for lane in both.lanes} == {0, 1}
    assert both.step_ms < alone
    rng = np.random.default_rng(0)
    names = [block.name for block in host_blocks(plan.schedule)]
    for share in rng.random(60):
        places = {name: (int(rng.random() < share), 0) for name in names}
        other = predicted(plan, TierPlacement(tiers, places, (0, 0))).step_ms
        assert both.step_ms <= other * 1.02


def test_places_do_not_overlap_and_keep_to_what_there_is(plan):
    whole = filled(plan, tier("host")).used[0]
    sizes = [whole // 3, whole // 3, whole]
    tiers = [tier(f"t{i}", n, 1e6 / (i + 1)) for i, n in enumerate(sizes)]
    placement = filled(plan, *tiers)
    blocks = {block.name: block for block in host_blocks(plan.schedule)}
    assert placement.places.keys() == blocks.keys() | set(plan.schedule.hosted)
    for name, (number, offset) in placement.places.items():
        nbytes = plan.schedule.graph.tensors[name].nbytes
        assert offset + nbytes <= placement.used[number] <= sizes[number]
    for a, b in itertools.combinations(blocks.values(), 2):
        (mine, start), (other, begin) = (
            placement.places[a.name],
            placement.places[b.name],
        )
        apart = a.last < b.first or b.last < a.first or mine != other
        assert apart or start + a.nbytes <= begin or begin + b.nbytes <= start


def test_too_little_of_all_is_told(plan):
    with pytest.raises(PlanningError, match=r"no room for .* 1.0 KiB of host.*another"):
        filled(plan, tier("host", 1024))


def test_a_step_is_planned_for_the_tiers_that_there_are(bench):
    request = StepRequest(bench.graph, bench.profile, policy="paging")
    request = request.within(int(minimum_budget(request) * 1.1))
    host, disk = tier("host", 1 << 18, 1e6), tier("disk", rate=1e4)
    placed = place_tiered_step(request, [disk, host])
    placement = placed.plan.prediction.placement
    assert [t.name for t in placement.tiers] == ["host", "disk"]
    assert all(placement.used)
    assert placed.nbytes <= request.budget
    assert str(placement).startswith("tensors: ")
    with pytest.raises(PlanningError, match="to be offloaded"):
        place_tiered_step(request, [tier("host", 1024)])


# --- asked for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "argument", "nbytes", "rate"),
    [
        ("host", "host", "", math.inf, None),
        ("host=1.5GiB", "host", "", 3 << 29, None),
        ("disk:/a/b", "disk", "/a/b", math.inf, None),
        ("disk:/a=b/c", "disk", "/a=b/c", math.inf, None),
        ("disk:/a=b/c=4KiB", "disk", "/a=b/c", 4096, None),
        ("disk:/a@b=c", "disk", "/a@b=c", math.inf, None),
        ("disk:/a@b=1KiB", "disk", "/a@b", 1024, None),
        ("peer:1", "peer", "1", math.inf, None),
        ("peer:12=7", "peer", "12", 7, None),
        ("host@12GB", "host", "", math.inf, 12e6),
        ("host=4GiB@1000", "host", "", 4 << 30, 1.0),
        ("peer:1=8@2kB", "peer", "1", 8, 2.0),
    ],
)
def test_a_tier_as_it_is_written(text, kind, argument, nbytes, rate):
    choice = TierChoice.parse(text)
    assert (choice.kind, choice.argument) == (kind, argument)
    assert (choice.nbytes, choice.bytes_per_ms) == (nbytes, rate)
    assert parse_tiers(text) == parse_tiers([choice]) == (choice,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "unknown tier .*; choose host, disk:FOLDER") for text in NO_TIERS),
        ("peer:x", "integer"),
        ("host@0", "the rate of host is 0 bytes per second"),
    ],
)
def test_what_is_no_tier(text, message):
    with pytest.raises(ValueError, match=message):
        TierChoice.parse(text)


def test_a_budget_takes_tiers_and_a_disk_is_short_for_one(tmp_path):
    short = MemoryBudget(nbytes=1, disk=tmp_path)
    assert short.tiers == MemoryBudget(nbytes=1, tiers=f"disk:{tmp_path}").tiers
    with pytest.raises(ValueError, match="is short for"):
        MemoryBudget(nbytes=1, disk=tmp_path, tiers="host")
    with pytest.raises(ValueError, match="tier host is given twice"):
        MemoryBudget(nbytes=1, tiers=["host", "host=3MiB"])
    with pytest.raises(TypeError, match="strings such as"):
        MemoryBudget(nbytes=1, tiers=[3])


# --- used --------------------------------------------------------------------------


def three(tmp_path):
    """None of them holds the 2 MB that leave within 0.6 of the state."""
    return ["host=1100KiB", f"disk:{tmp_path}=1400KiB", "peer:1=1000KiB"]


@needs_segments
@pytest.mark.parametrize("policy", ["planned", "paging"])
def test_a_step_with_three_tiers_gives_the_same_bits(policy, tmp_path):
    budget = within(0.6, policy=policy, tiers=three(tmp_path))
    made = trainer(budget)
    placement = made.placed.plan.prediction.placement
    assert {t.name for t in placement.tiers} == {"host", f"disk:{tmp_path}", "peer:1"}
    assert made.peak_bytes <= budget.nbytes
    assert len([used for used in placement.used if used]) >= 2
    for t, used in zip(placement.tiers, placement.used, strict=True):
        assert used <= t.nbytes
        assert t.out_bytes_per_ms > 0
        assert t.in_bytes_per_ms > 0
    assert history(made) == without_budget()[0]
    assert list(tmp_path.iterdir()) == []


@needs_segments
def test_all_three_are_copied_to(bench, plan, tmp_path):
    """Each for a third of what leaves, with links of its own."""
    whole = filled(plan, tier("host")).used[0]
    names = ["host", "peer:1", f"disk:{tmp_path}"]
    tiers = [tier(n, whole // 3 + 4096 * i) for i, n in enumerate(names)]
    tiers[2] = tier(names[2], whole)
    placement = filled(plan, *tiers)
    assert all(placement.used)
    device = bench.backend.device
    opened = [
        TierChoice.parse(name).open(device, used)
        for name, used in zip(names, placement.used, strict=True)
    ]
    try:
        found = bench.run(plan.schedule, host=Tiers(opened, placement))
    finally:
        for one in opened:
            one.close()
    same(found, bench.run(bench.kept()))


@needs_segments
def test_a_step_whose_copies_fail_stops(bench, plan, monkeypatch):
    def fails(source, target):
        raise OSError("the peer is gone")

    placement = filled(plan, tier("peer:1"))
    peer = bench.backend.device.peer(1, placement.used[0])
    monkeypatch.setattr(peer, "copier", lambda device: CpuCopier(fails))
    executor, _ = bench.executor(plan.schedule, host=Tiers([peer], placement))
    with pytest.raises(BackendError, match="the peer is gone"):
        executor.run(bench.feeds())
    executor.close()
    peer.close()


@needs_segments
def test_shared_memory_without_room_is_one_error():
    with pytest.raises(OutOfMemoryError, match=r"no room for .* disk of /dev/shm"):
        get_backend("cpu").device.peer(1, 1 << 50)
    with pytest.raises(ValueError, match="peer:0 is the device itself"):
        get_backend("cpu").device.peer(0, 8)


def test_a_missing_folder_and_a_small_tier_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"cannot create a file in .*none"):
        trainer(within(0.6, policy="paging", tiers=f"disk:{tmp_path / 'none'}"))
    with pytest.raises(
        PlanningError, match=r"to be offloaded; there are 4.0 KiB of host"
    ):
        trainer(within(0.6, policy="paging", tiers="host=4KiB"))
    with pytest.raises(PlanningError, match="add the tier host or disk:FOLDER"):
        trainer(within(0.6, policy="paging", tiers="peer:1"))


def test_rates_are_measured_each_way(tmp_path):
    choices = parse_tiers(["host", f"disk:{tmp_path}=1MiB"])
    host, disk = measured_tiers(get_backend("cpu").device, choices, 1 << 20)
    assert host.out_bytes_per_ms > 0
    assert disk.in_bytes_per_ms > 0
    assert (host.nbytes, disk.nbytes) == (math.inf, 1 << 20)
    (null,) = measured_tiers(get_backend("null").device, parse_tiers("peer:1"), 1 << 20)
    assert null.out_bytes_per_ms == null.in_bytes_per_ms == 1 << 24
    assert not null.addressable


def test_memory_of_another_gpu():
    cupy = StrictCupy(lazy=True)
    for wrong in (0, 2, -1):
        with pytest.raises(ValueError, match="not another GPU: this is number 0 of 2"):
            PeerMemory(cupy, 0, wrong, 64, lambda: 0)
    peer = PeerMemory(cupy, 0, 1, 64, lambda: 0)
    here = cupy.empty(32, "uint8")
    here.set(np.arange(32, dtype=np.uint8))
    copier = peer.copier(None)
    away = peer.view(32, 32)
    out = copied(copier, "out", here, away)
    back = cupy.empty(32, "uint8")
    copier.wait(copied(copier, "back", away, back, [out]))
    copier.finish()
    assert (back.get() == np.arange(32)).all()
    copier.close()
    peer.close()
