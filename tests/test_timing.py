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


def test_steady_runs_are_few_and_the_warm_up_does_not_count():
    device = Scripted(50, 2)
    assert measure(device.run, device, RULE) == Timing(2, 0, 3)
    assert device.runs == 4


def test_unsteady_runs_are_repeated_to_the_most():
    device = Scripted(*[1, 2, 4] * 20)
    timing = measure(device.run, device, RULE)
    assert timing.samples == 10
    assert timing.noise_ms > 0.01 * timing.time_ms


def test_the_margin_ends_it():
    device = Scripted(1, 1, 9, 1, 1, 1, 1, 1)
    timing = measure(device.run, device, RULE)
    assert timing == Timing(1, 0, 3)
    wide = StoppingRule(min_samples=3, max_samples=10, margin=10)
    device = Scripted(*[1, 2, 4] * 20)
    assert measure(device.run, device, wide).samples == 3


def test_the_budget_ends_it():
    device = Scripted(1, 60, 41, 5)
    assert measure(device.run, device, RULE).samples == 2


def test_one_slow_run_is_not_repeated():
    device = Scripted(101, 99)
    assert measure(device.run, device, RULE) == Timing(99, 0, 1)
    assert device.runs == 2


def test_a_hopeless_rival_is_not_repeated():
    device = Scripted(9, 8)
    assert measure(device.run, device, RULE, best_ms=2) == Timing(9, 0, 1)
    device = Scripted(8, 7)  # not as cold, it is behind all the same
    assert measure(device.run, device, RULE, best_ms=2) == Timing(7, 0, 1)
    for times in ((8, 4), (4, 8)):
        device = Scripted(*times)
        assert measure(device.run, device, RULE, best_ms=2).samples == 3


def test_after_the_deadline_the_samples_at_hand_are_final():
    device = Scripted(1, 2, 4, 8, 16, 32)

    def clock():
        return float(device.runs)

    assert measure(device.run, device, RULE, deadline=3, clock=clock) == Timing.of(
        [2, 4]
    )


def test_with_no_time_for_more_the_warm_up_tells_that_it_is_one():
    device = Scripted(7, 1)
    timing = measure(device.run, device, RULE, deadline=0, clock=lambda: 0.0)
    assert timing == Timing(7, 0, samples=0)
    assert device.runs == 1


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


def test_launches_are_hidden_by_their_number():
    """A plan in four parts is held back until the host has launched all four."""
    device = Scripted(1)
    measure_together([device.run, device.run], device, RULE, launches=[4, 1])
    assert device.hidden == [4, 1] * 4


def test_rivals_are_timed_alike_whatever_the_budget():
    """One run apiece would be a coin toss: the spread would not be known."""
    device = Scripted(200)
    timings = measure_together([device.run, device.run], device, RULE)
    assert [t.samples for t in timings] == [3, 3]


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


def test_rivals_stop_at_the_deadline():
    device = Scripted(1)
    timings = measure_together(
        [device.run, device.run], device, RULE, deadline=0, clock=lambda: 0.0
    )
    assert timings == (Timing(1, 0, 0), Timing(1, 0, 0))


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
