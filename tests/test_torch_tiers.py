"""Steps of PyTorch's that leave to one or several memories: same bits, clear errors."""

import copy
import errno
import gc
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.backends.cpu.device import CpuCopier, DiskTier, copy_bytes
from mucudnn.errors import BackendError, OutOfMemoryError, PlanningError
from mucudnn.runtime.executor.tiers import parse_tiers
from mucudnn.torch import CompileBackend, TrainStep
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.execution.bound_step import is_outside_allocator
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.tiers import StepTiers, TierCopies
from mucudnn.torch.plan_program import PlanOptions
from mucudnn.torch.plan_store import PlanStore, open_plans
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import (
    build,
    least_bytes,
    load_in_place,
    real_peak,
    train_eagerly,
)

pytestmark = [*STEPS_RUN, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
needs_segments = pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="needs shared memory in /dev/shm"
)
PEER = "peer:1@1GiB"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Every kind of step is measured once."""
    return open_plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(autouse=True)
def quick(monkeypatch, plans):
    """Searches that end soon."""
    monkeypatch.setattr("mucudnn.passes.planning.search._ROUNDS", ((1, 20),))
    monkeypatch.setattr(Step, "plans", plans)


def costs(lowered):
    """Every node takes so long that nothing is computed again: all has to leave."""
    found = measured(lowered)
    times = {name: 1000.0 if ms > 0.001 else ms for name, ms in found.node_ms.items()}
    return replace(found, node_ms=times)


class Step:
    """A model with its step, and what eager training makes of it."""

    plans = PlanStore()

    def __init__(self, budget, tiers, name="mlp", **options):
        self.model, self.loss_fn, self.batch = build(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        choices = parse_tiers(tiers)
        targets = StepTiers(choices, shared=True) if choices else None
        options = PlanOptions(costs, self.plans, tiers=targets, **options)
        self.run = TrainStep(self.model, self.loss_fn, self.optimizer, budget, options)
        self.arenas = targets and targets._arenas

    def losses(self, count=3):
        torch.manual_seed(1)
        return [self.run(*self.batch).item() for _ in range(count)]

    def eager(self, count=3):
        """Of as many steps that begin where this one does."""
        return self.eager_outcome(count)[0]

    def eager_outcome(self, count=3):
        """The losses of such steps, and their tensors."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        torch.manual_seed(1)
        losses = train_eagerly(model, self.loss_fn, self.batch, optimizer, count)
        return losses, tensors_of(model, optimizer)

    def tensors(self):
        return tensors_of(self.model, self.optimizer)


def tensors_of(model, optimizer):
    state = (t for s in optimizer.state.values() for t in s.values())
    return [*model.parameters(), *model.buffers(), *state]


def least(name="mlp", **options):
    step = Step(0, (), name, **options)
    return least_bytes(step.run.prepare, *step.batch)


def used(plan):
    return plan.plan.prediction.placement.used


def check_kept(step, budget):
    """Steps are eager ones, and what they have on the device keeps the budget."""
    parameters = list(step.model.parameters())
    plan = step.run.prepare(*step.batch)
    wanted, state = step.eager_outcome()
    assert step.losses() == wanted
    found = step.tensors()
    assert all(map(torch.equal, found, state))
    assert all(a is b for a, b in zip(step.model.parameters(), parameters, strict=True))
    away = plan.plan.schedule.hosted
    assert sum(map(is_outside_allocator, found)) >= len(away)
    inside = (t for t in found if not is_outside_allocator(t))
    here = sum(t.untyped_storage().nbytes() for t in inside)
    beyond = real_peak(lambda: step.run(*step.batch))
    assert here <= plan.resident_bytes
    assert here + beyond <= plan.peak_bytes <= budget
    return plan


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_state_that_lives_on_the_host(name, share):
    lowest, resident = least(name, offload_state=True), least(name)
    assert lowest < resident
    budget = lowest + round(share * (resident - lowest))
    plan = check_kept(Step(budget, (), name, offload_state=True), budget)
    assert plan.plan.schedule.hosted


@needs_segments
@pytest.mark.parametrize("offload_state", [False, True])
def test_a_step_leaves_to_three_memories(tmp_path, offload_state):
    budget = least(offload_state=offload_state)
    tiers = ["host=132KiB@4GiB", "peer:1=132KiB@2GiB", f"disk:{tmp_path}@1GiB"]
    plan = check_kept(Step(budget, tiers, offload_state=offload_state), budget)
    assert min(used(plan)) > 0
    assert used(plan)[0] <= 132 << 10
    assert "peer:1 (128.0 KiB)" in str(plan)
    assert bool(plan.plan.schedule.hosted) == offload_state
    assert not list(tmp_path.iterdir())


def test_what_lives_on_the_host_is_read_saved_and_loaded_as_ever():
    step = Step(least(offload_state=True), (), offload_state=True)
    wanted, (x, y) = step.eager(5), step.batch
    assert step.losses(2) == wanted[:2]
    parts = step.model, step.optimizer
    saved = copy.deepcopy([part.state_dict() for part in parts])
    with torch.no_grad():
        assert step.loss_fn(step.model(x), y).item() == wanted[2]
    step.losses(1)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    assert step.losses(3) == wanted[2:]
    hosted = len(step.run.plan.plan.schedule.hosted)
    assert sum(map(is_outside_allocator, step.tensors())) == hosted


def test_a_copy_home_that_is_left_out_is_noticed(monkeypatch):
    step = Step(least(offload_state=True), (), offload_state=True)
    wanted = step.eager()
    monkeypatch.setattr(ThreadCopies, "write_back", lambda *_: None)
    assert step.losses() != wanted


@needs_segments
def test_what_a_failing_copy_had_is_lost_for_one_step_only(monkeypatch):
    failing = []

    def copied(source, target):
        if failing:
            raise OSError("the peer is gone")
        copy_bytes(source, target)

    monkeypatch.setattr(DiskTier, "copier", lambda self, of: CpuCopier(copied))
    step = Step(least(), PEER)
    wanted = step.eager(4)
    assert step.losses(2) == wanted[:2]
    before = copy.deepcopy(step.model.state_dict())
    failing.append(True)
    with pytest.raises(BackendError, match=r"the peer is gone.*; no parameter"):
        step.run(*step.batch)
    failing.clear()
    after = step.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert step.losses(2) == wanted[2:]
    gc.collect()
    assert len(step.arenas._open) == 1


def test_a_step_that_fails_while_it_updates_says_so(tmp_path, monkeypatch):
    home, failing = TierCopies.write_back, []

    def fails(*args):
        home(*args)
        if failing and not failing.pop():
            raise BackendError("a copy to the host failed")

    monkeypatch.setattr(TierCopies, "write_back", fails)
    step = Step(least(offload_state=True), f"disk:{tmp_path}@1GiB", offload_state=True)
    wanted = step.eager(4)
    assert step.losses(1) == wanted[:1]
    parts = step.model, step.optimizer
    before = copy.deepcopy([part.state_dict() for part in parts])
    tensors = [tensor.detach().clone() for tensor in step.tensors()]
    told = set()
    for count in range(100):
        failing[:] = [False, *[True] * count]
        error = None
        try:
            step.losses(1)
        except BackendError as e:
            error = str(e)
        if error is not None:
            begun = re.search("had begun to change .* from a checkpoint", error)
            assert begun or "no parameter or state was changed" in error
            told.add(bool(begun))
            if begun:
                with pytest.raises(BackendError, match=r"half done by .*reset"):
                    step.losses(1)
                step.run.reset()
            else:
                assert all(map(torch.equal, step.tensors(), tensors))
        done = bool(failing)
        step.model.load_state_dict(before[0])
        load_in_place(step.optimizer, copy.deepcopy(before[1]))
        if done:
            break
    failing.clear()
    assert told == {False, True}
    assert step.losses(3) == wanted[1:]


def test_a_full_disk_is_one_error_before_anything_runs(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    budget = least()
    step = Step(budget, f"disk:{tmp_path}@1GiB")
    wanted = step.eager()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=r"no room for .* on the disk of"):
        step.run(*step.batch)
    monkeypatch.undo()
    assert step.losses() == wanted
    with pytest.raises(PlanningError, match=r"no room for .* 1.0 KiB of host"):
        Step(budget, "host=1KiB@1GiB").losses()


def test_batches_of_two_sizes_share_a_room(tmp_path):
    step = Step(least(), f"disk:{tmp_path}@1GiB")
    x, y = step.batch
    for size in (4, 8, 4, 8):
        step.run(x[:size], y[:size])
    assert len(step.arenas._open) == len(step.arenas._free) == 1


def test_a_step_in_parts_leaves_to_a_file(tmp_path):
    disk = f"disk:{tmp_path}@1GiB"
    lowest, whole = least(split=2), Step(least(), ())
    step = Step(lowest, disk, split=2)
    plan = step.run.prepare(*step.batch)
    assert used(plan)[0] > 0
    assert step.losses() == pytest.approx(whole.losses(), rel=1e-5)
    assert real_peak(lambda: step.run(*step.batch)) <= lowest


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:saved tensors of")
@needs_segments
def test_a_compiled_model_leaves_to_tiers_with_two_passes_under_way(tmp_path, plans):
    model, loss_fn, (x, y) = build("conv")
    eager = copy.deepcopy(model)
    refusing = CompileBackend(0, PlanOptions(costs, plans))
    budget = least_bytes(torch.compile(model, backend=refusing), x)
    torch.compiler.reset()
    tiers = ["peer:1=132KiB@2GiB", f"disk:{tmp_path}@1GiB"]
    away = StepTiers(parse_tiers(tiers), shared=False)
    backend = CompileBackend(budget, PlanOptions(costs, plans, tiers=away))
    compiled = torch.compile(model, backend=backend)
    for run in (compiled, eager):
        losses = [loss_fn(run(part), y) for part in (x, x.flip(0), x * 2)]
        for loss in reversed(losses):
            loss.backward()
    (plan,) = backend.plans
    assert min(used(plan)) > 0
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_faces_take_the_same_words(tmp_path):
    model, loss_fn, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    disk = f"disk:{tmp_path}@1GiB"
    study = mt.memory(model, loss_fn, batch, optimizer, tiers=("host=8KiB", disk))
    assert len(used(study.plan(study.least_budget))) == 2
    step = mt.train_step(
        model, loss_fn, optimizer, budget="8MiB", tiers=("host=8KiB", disk), cache=None
    )
    assert "0 to host (0 B)" in str(step.prepare(*batch))
    nowhere = mt.backend(budget="8MiB", tiers="disk:/nowhere", cache=None)
    with pytest.raises(ValueError, match=r"cannot create a file in /nowhere"):
        torch.compile(model, backend=nowhere)(batch[0])
