"""When a kernel has been timed enough, on a clock that follows a script."""

import itertools
import statistics

import pytest
from hypothesis import given, strategies as st

from mucudnn.runtime.tuning.timing import (
    StoppingRule,
    Timing,
    measure,
    measure_together,
)


class Scripted:
    """A device whose runs take what the script says; the last time is repeated."""

    fingerprint = "scripted"

    def __init__(self, *times_ms):
        self._times = itertools.chain(times_ms, itertools.repeat(times_ms[-1]))
        self.now_ms = 0.0
        self.hidden = []
        self.runs = 0

    def run(self):
        self.runs += 1
        self.now_ms += next(self._times)

    def taking(self, ms):
        """A run of its own that takes so long."""

        def run():
            self.now_ms += ms

        return run

    def record(self):
        return self.now_ms

    def begin(self, launches=1):
        self.hidden.append(launches)
        return self.now_ms

    def elapsed_ms(self, start, stop):
        return stop - start


RULE = StoppingRule(min_samples=3, max_samples=10, margin=0.01, budget_ms=100)


NO_TIME = {"deadline": 0, "clock": lambda: 0.0}


@pytest.mark.parametrize(
    ("script", "options", "expected", "runs"),
    [
        ((50, 2), {}, Timing(2, 0, 3), 4),  # the warm-up does not count
        ((1, 1, 9, 1, 1), {}, Timing(1, 0, 3), 4),  # the margin ends it
        ((1, 60, 41, 5), {}, Timing.of([60, 41]), 3),  # the budget
        ((101, 99), {}, Timing(99, 0, 1), 2),  # one slow run is not repeated
        ((9, 8), {"best_ms": 2}, Timing(9, 0, 1), 1),  # nor a hopeless rival,
        ((8, 7), {"best_ms": 2}, Timing(7, 0, 1), 2),  # not as cold
        ((8, 4), {"best_ms": 2}, Timing(4, 0, 3), 4),
        ((4, 8), {"best_ms": 2}, Timing(8, 0, 3), 4),
        ((7, 1), NO_TIME, Timing(7, 0, 0), 1),  # the warm-up is told to be one
    ],
)
def test_what_ends_the_runs_of_a_kernel(script, options, expected, runs):
    device = Scripted(*script)
    assert measure(device.run, device, RULE, **options) == expected
    assert device.runs == runs


def test_unsteady_runs_are_repeated_to_the_most():
    device = Scripted(*[1, 2, 4] * 20)
    timing = measure(device.run, device, RULE)
    assert timing.samples == 10
    assert timing.noise_ms > 0.01 * timing.time_ms
    wide = StoppingRule(min_samples=3, max_samples=10, margin=10)
    assert measure(device.run, device, wide).samples == 3


def test_after_the_deadline_the_samples_at_hand_are_final():
    device = Scripted(1, 2, 4, 8, 16, 32)

    def clock():
        return float(device.runs)

    assert measure(device.run, device, RULE, deadline=3, clock=clock) == Timing.of(
        [2, 4]
    )


def test_rivals_take_turns():
    device, order = Scripted(1), []

    def runner(name, ms):
        def run():
            order.append(name)
            device.now_ms += ms

        return run

    timings = measure_together([runner("a", 1), runner("b", 5)], device, RULE)
    assert "".join(order) == "ab" * 4
    assert device.hidden == [1] * 8
    assert timings == (Timing(1, 0, 3), Timing(5, 0, 3))


def test_rivals_are_timed_alike_whatever_hides_their_launches_or_ends_their_time():
    """One run apiece would be a coin toss: the spread would not be known.

    A plan in four parts is held back until the host has launched all four.
    """
    device = Scripted(1)
    measure_together([device.run, device.run], device, RULE, launches=[4, 1])
    assert device.hidden == [4, 1] * 4
    for script, options, samples in ((200, {}, 3), (1, NO_TIME, 0)):
        device = Scripted(script)
        timings = measure_together([device.run] * 2, device, RULE, **options)
        assert timings == (Timing(script, 0, samples),) * 2


def test_a_clear_lead_of_slow_rivals_needs_no_third_round():
    device = Scripted(0)
    fast, slow, near = (device.taking(ms) for ms in (40, 61, 59))
    ahead = measure_together([fast, slow], device, RULE)
    assert [t.samples for t in ahead] == [1, 1]
    close = measure_together([fast, near], device, RULE)
    assert [t.samples for t in close] == [3, 3]


def test_a_slow_challenger_that_is_not_faster_is_tried_once():
    device = Scripted(0)
    mine, theirs = device.taking(62), device.taking(60)
    beaten = measure_together([mine, theirs], device, RULE, challenger=True)
    assert [t.samples for t in beaten] == [1, 1]
    ahead = measure_together([theirs, mine], device, RULE, challenger=True)
    assert [t.samples for t in ahead] == [3, 3], "a lead has to be proved"
    quick = Scripted(1)
    tied = measure_together([quick.run, quick.run], quick, RULE, challenger=True)
    assert [t.samples for t in tied] == [3, 3], "what takes no time is tried on"


times = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@given(times)
def test_a_timing_is_the_median(samples):
    timing = Timing.of(samples)
    assert timing.time_ms == statistics.median(samples)
    assert timing.samples == len(samples)
    assert 0 <= timing.noise_ms <= 2 * (max(samples) - min(samples))


@given(times)
def test_a_measurement_ends_and_obeys_its_rule(script):
    device = Scripted(*script)
    timing = measure(device.run, device, RULE)
    assert 1 <= timing.samples <= RULE.max_samples
    if timing.samples < RULE.min_samples:
        assert device.now_ms >= RULE.budget_ms
    taken = (script + script[-1:] * 20)[1 : 1 + timing.samples]
    assert timing == Timing.of(taken)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (6, 5)])
def test_a_rule_that_cannot_be_met_is_refused(least, most):
    with pytest.raises(ValueError, match=f"min_samples is {least}"):
        StoppingRule(min_samples=least, max_samples=most)
