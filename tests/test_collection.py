"""Collecting rarely: thresholds change within, and are what they were behind."""

import gc
import threading

import pytest

from mucudnn.passes.planning.collection import gc_relaxed


@pytest.fixture(autouse=True)
def _restored():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_within_and_restored():
    with gc_relaxed():
        assert gc.get_threshold()[0] > 700
        with gc_relaxed():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold()[0] > 700
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_restores_them_too():
    with pytest.raises(ValueError, match="inside"), gc_relaxed():
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)
    with gc_relaxed():
        assert gc.get_threshold()[0] > 700


@pytest.mark.parametrize("first", [0, 10_000_000])
def test_what_is_off_or_rarer_stays(first):
    gc.set_threshold(first, 5, 5)
    with gc_relaxed():
        assert gc.get_threshold() == (first, 5, 5)
    assert gc.get_threshold() == (first, 5, 5)


def test_threads_that_overlap_leave_what_was_there():
    entered, leave = threading.Event(), threading.Event()

    @gc_relaxed()
    def other():
        entered.set()
        leave.wait(300)

    with gc_relaxed():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(300)
    assert gc.get_threshold() == (700, 10, 10)
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)
