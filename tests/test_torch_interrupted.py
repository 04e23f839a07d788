"""Steps that are interrupted, run in threads, or run in a forked child."""

import copy
import os
import random
import signal
import sys
import threading
import time
import traceback
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import mucudnn.torch as mt
from mucudnn.errors import BackendError, PlanningError, UnsupportedError
from mucudnn.torch.capture.exclusive import exclusive_capture
from tests.torch_marks import STEPS_RUN
from tests.torch_own_updates import CountingInState, Sharpened
from tests.torch_steps import least_bytes, load_in_place

pytestmark = STEPS_RUN

OURS = ("bound_step.py", "interrupts.py", "optimizer_update.py", "torch_own_updates.py")
"""Files that are interrupted at their lines, beside planned programs."""


class Parts:
    """A model, its optimizer and what else a step changes, always the same."""

    def __init__(self, optimizer, width=16, *, seed=0, drop=0.2, scaler=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(drop)
        )
        self.model.append(nn.Linear(width, 4))
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = scaler
        self.batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(3)]

    def step(self, **options):
        options = {"cache": None, "scaler": self.scaler, **options}
        return mt.train_step(self.model, functional.mse_loss, self.optimizer, **options)

    def now(self):
        """All that a step, or planning one, may change."""
        own = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "grad": [p.grad for p in self.model.parameters()],
            "training": [m.training for m in self.model.modules()],
        }
        drawn = torch.get_rng_state(), hash(random.getstate())
        numpy = hash(np.random.get_state()[1].tobytes())  # noqa: NPY002  the global one
        return copy.deepcopy((own, (*drawn, numpy), signal.getsignal(signal.SIGINT)))

    def restore(self, now):
        own, drawn, _ = copy.deepcopy(now)  # an optimizer takes what it loads
        self.model.load_state_dict(own["model"])
        load_in_place(self.optimizer, own["optimizer"])
        if self.scaler:
            self.scaler.load_state_dict(own["scaler"])
        torch.set_rng_state(drawn[0])


def equal(one, other):
    """Whether two nests of tensors and plain values are the same."""
    (mine, form), (theirs, other_form) = map(pytree.tree_flatten, (one, other))
    return form == other_form and all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def interrupted(act, number, raise_, files=None):
    """Act, and raise something at a line of what is run; kernels alone fail.

    Returns what was raised, and whether there are so many lines.
    """
    if files is None:
        files = OURS if raise_ is ctrl_c else OURS[-1:]
    seen, met = count(1), []

    def line(frame, event, argument):
        if event == "line" and next(seen) == number:
            met.append(frame.f_lineno)
            sys.settrace(None)
            raise_()
        return line

    def call(frame, event, argument):
        name = frame.f_code.co_filename
        return line if name == "<planned step>" or name.endswith(files) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        act()
    except (KeyboardInterrupt, RuntimeError) as e:
        return e, bool(met)
    finally:
        sys.settrace(before)
    return None, bool(met)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def fails():
    raise RuntimeError("a kernel failed")


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


CASES = {
    "sgd": (sgd, {}),
    "adam accumulate clip": (torch.optim.Adam, {"accumulate": 2, "clip_norm": 0.1}),
    "scaler": (sgd, {"scaler": True}),
    "offloaded": (torch.optim.Adam, {"offload_state": True}),
    "disk": (torch.optim.Adam, {"offload_state": True, "tiers": "disk:{}@1GiB"}),
    "own update": (CountingInState, {}),
    "own update with a scaler": (CountingInState, {"scaler": True}),
    "closure": (Sharpened, {}),
}


def built(case, tmp_path):
    """A case's parts and its step; in the least budget where something leaves."""
    optimizer, options = CASES[case]
    options = dict(options)
    scaler = torch.amp.GradScaler("cpu") if options.pop("scaler", False) else None
    parts = Parts(optimizer, scaler=scaler)
    if "tiers" in options:
        options["tiers"] = options["tiers"].format(tmp_path)
    if options.get("offload_state"):
        refusing = parts.step(budget=0, **options)
        options["budget"] = least_bytes(refusing.prepare, *parts.batches[0])
    return parts, parts.step(**options)


@pytest.mark.parametrize("raise_", [ctrl_c, fails])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_step_is_whole_or_refuses_the_next(case, raise_, tmp_path):
    """Each case begins at another line: together they are interrupted at all."""
    stride = len(CASES)
    parts, step = built(case, tmp_path)
    first, batch, _ = parts.batches
    step(*first)
    before = parts.now()
    step(*batch)
    after = parts.now()
    assert not equal(before, after)
    ends = set()
    for number in count(1 + [*CASES].index(case), stride):
        parts.restore(before)
        error, met = interrupted(partial(step, *batch), number, raise_)
        if not met:
            break
        now = parts.now()
        end = "before" if equal(now, before) else "after" if equal(now, after) else ""
        if end == "after" and raise_ is ctrl_c:
            assert isinstance(error, KeyboardInterrupt)
        if not end or (end == "after" and raise_ is fails):
            assert raise_ is fails, (number, error.__notes__)
            assert "half done" in error.__notes__[0]
            with pytest.raises(BackendError, match=r"half done .*load_state_dict"):
                step(*batch)
            assert equal(parts.now(), now)
            step.reset()
            end = "half"
        ends.add(end)
        parts.restore(before)
        step(*batch)
        assert equal(parts.now(), after), number
    assert error is None
    assert ends == {"before", "after" if raise_ is ctrl_c else "half"}


def test_a_second_ctrl_c_does_not_wait():
    parts = Parts(sgd)
    step = parts.step()
    step(*parts.batches[0])
    begin = step._commit.begin

    def twice():
        begin()
        ctrl_c()
        ctrl_c()

    step._commit.begin = twice
    with pytest.raises(KeyboardInterrupt) as caught:
        step(*parts.batches[1])
    assert "half done by KeyboardInterrupt" in caught.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step._commit.begin = begin
    with pytest.raises(BackendError, match="half done by KeyboardInterrupt"):
        step(*parts.batches[1])


class Unlucky(nn.Module):
    """A model or loss that fails, draws or changes something while it is captured."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, y, t):
        if self.how == "raises":
            y.mul_(2)
            raise ValueError("no loss today")
        if self.how == "draws":
            drawn = np.random.rand() + random.random()  # noqa: NPY002
            return functional.mse_loss(y, t) * drawn
        if self.how == "counts":
            self.calls += 1
        if self.how == "decides" and y.sum() > 0:
            return y.sum()
        return functional.mse_loss(y, t)


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.Adam, CountingInState])
@pytest.mark.parametrize(
    ("how", "error", "options"),
    [
        ("raises", ValueError, {"budget": "1GiB"}),
        ("draws", None, {}),
        ("counts", None, {}),
        ("decides", UnsupportedError, {}),
        ("refused", PlanningError, {"budget": 0}),
        ("prepared", None, {}),
    ],
)
def test_what_is_planned_or_refused_changes_nothing(how, error, options, optimizer):
    parts = Parts(optimizer)
    loss = Unlucky(how)
    step = mt.train_step(parts.model, loss, parts.optimizer, cache=None, **options)
    before = parts.now()
    for act in (step.prepare, step) if error else (step.prepare,):
        if error:
            with pytest.raises(error):
                act(*parts.batches[0])
        else:
            act(*parts.batches[0])
        assert equal(parts.now(), before)
        assert loss.calls == 0
    if how == "prepared":
        step(*parts.batches[0])
        alone = Parts(optimizer)
        alone.step()(*alone.batches[0])
        assert equal(parts.now(), alone.now())
        assert step.plan is step.prepare(*parts.batches[0])
        assert equal(parts.now(), alone.now())


PLANNING = ("step.py", "optimizers.py", "parts.py", "watch.py", "whole_step.py")


@pytest.mark.parametrize("optimizer", [sgd, CountingInState])
@pytest.mark.parametrize("number", [1, 200, 900, 1500])
def test_ctrl_c_while_a_step_is_prepared_changes_nothing(number, optimizer):
    """While it is planned, and once it is."""
    parts = Parts(optimizer)
    step = parts.step()
    before, batch = parts.now(), parts.batches[0]
    for act in (step.prepare, step):
        error, met = interrupted(partial(act, *batch), number, ctrl_c, PLANNING)
        if met:
            assert isinstance(error, KeyboardInterrupt)
            assert equal(parts.now(), before)
        else:
            parts.restore(before)  # it was planned by then
    step.prepare(*batch)
    for again in count(1):
        files = (*OURS, "optimizers.py")
        _, met = interrupted(partial(step.prepare, *batch), again, ctrl_c, files)
        assert equal(parts.now(), before)
        if not met:
            break
    step(*batch)
    alone = Parts(optimizer)
    alone.step()(*alone.batches[0])
    assert equal(parts.now(), alone.now())


def trained(parts, start=lambda: None):
    """All of a model after three steps."""
    start()
    step = parts.step()
    for batch in parts.batches:
        step(*batch)
    return parts.now()[0]


def test_models_are_trained_in_threads_of_one_process():
    def parts(k):
        return Parts(torch.optim.Adam if k % 2 else sgd, 16 + k, seed=k, drop=0)

    alone = [trained(parts(k)) for k in range(6)]
    every, barrier, found = [parts(k) for k in range(6)], threading.Barrier(6), {}

    def work(k):
        found[k] = trained(every[k], barrier.wait)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(6):
        assert equal(found[k], alone[k]), k


def in_child(act, seconds=60):
    """Act in a forked child; its exit status, or the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@forks
@pytest.mark.parametrize("offload_state", [False, True])
def test_a_forked_child_goes_on_with_a_step_that_offloads(offload_state):
    parts = Parts(torch.optim.Adam, 65536, drop=0)
    options = {"offload_state": offload_state}
    refusing = parts.step(budget=0, **options)
    least = least_bytes(refusing.prepare, *parts.batches[0])
    step = parts.step(budget=least, **options)
    step(*parts.batches[0])
    copies = step._last.bound.segment.run.__globals__["copy_back"].__self__
    assert copies._copier._last
    before = parts.now()
    step(*parts.batches[1])
    after = parts.now()[0]
    parts.restore(before)

    def act():
        step(*parts.batches[1])
        assert equal(parts.now()[0], after)

    assert in_child(act) == 0
    assert equal(parts.now(), before)  # the child's memory is its own
    step(*parts.batches[1])
    assert equal(parts.now()[0], after)


@forks
def test_a_child_forked_while_another_thread_captures(monkeypatch):
    parts = Parts(sgd)
    step = parts.step()

    def plans():
        step.prepare(*parts.batches[0])

    def refuses():
        start = time.monotonic()
        with pytest.raises(BackendError, match="was forked while another thread"):
            plans()
        assert time.monotonic() - start < 15  # the other thread captures for 30

    for patience, act in (5, plans), (0.05, refuses):
        monkeypatch.setattr("mucudnn.torch.capture.exclusive._FORK_S", patience)
        began, end = threading.Event(), threading.Event()

        def capture(began, end, seconds):
            with exclusive_capture():
                began.set()
                end.wait(seconds)

        seconds = 0.3 if act is plans else 30
        thread = threading.Thread(target=capture, args=(began, end, seconds))
        thread.start()
        began.wait()
        assert in_child(act) == 0
        end.set()
        thread.join()
    with exclusive_capture():  # which this thread has itself
        assert in_child(plans) == 0
    step(*parts.batches[0])
