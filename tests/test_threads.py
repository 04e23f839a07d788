"""A crew of threads does every item once, and leaves BLAS as it was."""

import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st
from threadpoolctl import threadpool_info

from mucudnn.backends.cpu.threads import Workers, as_kernels
from tests.examples import examples


def blas_threads():
    return [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]


@pytest.fixture(autouse=True)
def blas_is_left_alone():
    before = blas_threads()
    yield
    assert blas_threads() == before


@given(
    count=st.integers(1, 4),
    items=st.lists(st.integers(), max_size=50),
    at_most=st.none() | st.integers(1, 6),
)
@examples(40)
def test_every_item_once_and_a_worker_is_one_thread_at_a_time(count, items, at_most):
    seen, busy, wrong = [], set(), []

    def work(worker, item):
        if worker in busy or not 0 <= worker < min(count, at_most or count):
            wrong.append(worker)
        busy.add(worker)
        seen.append(item)
        busy.discard(worker)

    Workers(count).each(iter(items), work, at_most)
    assert Counter(seen) == Counter(items)
    assert wrong == []


@given(total=st.integers(0, 100), count=st.integers(1, 5))
@examples(40)
def test_ranges_cover_the_total_in_equal_shares(total, count):
    shares = []
    Workers(count).ranges(total, lambda *share: shares.append(share))
    shares.sort()
    assert [worker for worker, _, _ in shares] == list(range(len(shares)))
    assert len(shares) <= count
    assert [i for _, start, stop in shares for i in range(start, stop)] == list(
        range(total)
    )
    sizes = [stop - start for _, start, stop in shares]
    assert all(size == sizes[0] for size in sizes[:-1])
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("bad", [0, 9])
def test_an_exception_is_raised_after_all_have_stopped(count, bad):
    running = set()

    def work(worker, item):
        running.add(worker)
        try:
            if item == bad:
                raise KeyError(item)
        finally:
            running.discard(worker)

    with pytest.raises(KeyError, match=str(bad)):
        Workers(count).each(range(10), work)
    assert running == set()


@pytest.mark.parametrize("count", [1, 2])
def test_blas_has_one_thread_within(count):
    inside = []
    Workers(count).each(range(5), lambda worker, item: inside.append(blas_threads()))
    assert {n for threads in inside for n in threads} <= {1}


def in_time(body):
    """Run `body` in a thread, which must end; its exception is raised."""
    errors = []

    def run():
        try:
            body()
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "still waiting"
    for error in errors:
        raise error


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_crew_may_call_the_crew(count):
    workers, seen = Workers(count), []

    def outer(worker, item):
        workers.each(range(4), lambda _, inner: seen.append((item, inner)))

    in_time(lambda: workers.each(range(6), outer))
    assert sorted(seen) == [(i, j) for i in range(6) for j in range(4)]


def test_callers_may_share_a_crew():
    workers, seen = Workers(2), []

    def call(name):
        for _ in range(20):
            workers.each(range(5), lambda _, item: seen.append((name, item)))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(3), timeout=300))
    assert Counter(seen) == {(n, i): 20 for n in range(3) for i in range(5)}


def test_as_kernels_are_restored():
    before = np.getbufsize()
    with as_kernels():
        assert np.getbufsize() < before
    assert np.getbufsize() == before


def test_what_was_worked_on_is_let_go_of_while_the_crew_is_busy_elsewhere():
    """A cancelled task stays in a pool's queue, with all that it refers to."""
    workers, busy, over = Workers(2), threading.Event(), threading.Event()

    def elsewhere():
        workers.each(range(2), lambda worker, item: busy.set() or over.wait(300))

    def worked_on():
        memory = np.zeros(8)
        workers.each(range(3), lambda worker, item: memory[item : item + 1].sum())
        return weakref.ref(memory)

    other = threading.Thread(target=elsewhere)
    other.start()
    try:
        assert busy.wait(300)
        assert worked_on()() is None
    finally:
        over.set()
        other.join()


def test_what_was_worked_on_is_let_go_of_when_all_are_done():
    workers = Workers(2)
    for _ in range(200):
        memory = np.zeros(8)
        left = weakref.ref(memory)
        workers.each(range(8), lambda worker, item, m=memory: m[item : item + 1].sum())
        del memory
        assert left() is None
