"""A process that forks while its threads are at work, and its children, go on."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mucudnn.processes import PerProcess
from tests.commands import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

START = """
import faulthandler, os, signal, sys, threading, time, traceback, warnings
import numpy as np
import mucudnn
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.suites import parse_problem
warnings.simplefilter("ignore", DeprecationWarning)
QUICK = StoppingRule(min_samples=1, max_samples=1)

def in_child(act, seconds=60):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds)  # a child that hangs is killed and seen
            faulthandler.dump_traceback_later(seconds - 5)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(code, *arguments):
    options = {"environment": {"OPENBLAS_NUM_THREADS": "2"}}
    return python("-c", START + code, *arguments, **options)[0]


TUNING = """
name, file = sys.argv[1:]
tuner = mucudnn.Tuner(backend=name, cache=file or None, rule=QUICK)
stop, busy = threading.Event(), []

def layer(c):
    return parse_problem(f"n=4,c={c},h=6,w=6,k=3,r=3,s=3,pad=1")

def work(start):
    for c in range(start, 10_000_000, 3):
        if stop.is_set():
            return
        tuner.plan([layer(c)])
        busy.append(c)

threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in (1, 2)]
for thread in threads:
    thread.start()

def act(c):
    plan, = tuner.plan([layer(c)])
    assert plan.problem == layer(c)
    if name == "cpu":
        x = np.ones((4, 3, 6, 6), np.float32)
        w = np.ones((2, 3, 3, 3), np.float32)
        y = mucudnn.conv2d(x, w, tuner=tuner)
        assert (y == 27).all()

def wait_for(more):
    deadline = time.monotonic() + 60
    while len(busy) < more:
        if time.monotonic() > deadline:
            faulthandler.dump_traceback()  # says where the parent's threads are stuck
            os._exit(3)
        time.sleep(0.001)

wait_for(2)
for turn in range(25):
    before = len(busy)
    status = in_child(lambda: act(3 * (turn + 1)))
    assert status == 0, (turn, status)
    wait_for(before + 1)
stop.set()
for thread in threads:
    thread.join()
known = tuner.cache.summary()
print(sum(device.problems for device in known))
"""


@pytest.mark.parametrize("name", ["null", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_children_of_a_process_that_tunes_can_tune(name, where, tmp_path):
    file = tmp_path / "c.sqlite" if where == "file" else ""
    problems = int(run(TUNING, name, file))
    if where == "file":
        from mucudnn.runtime.store.measurements import BenchmarkCache

        with BenchmarkCache(file) as cache:  # what children measured is in it, too
            (device,) = cache.summary()
        assert device.problems >= problems > 25


@pytest.mark.slow
def test_a_child_has_all_threads_of_its_blas():
    run("""
from mucudnn.backends.cpu.threads import Workers
workers = Workers(2)
libraries = workers._blas._libraries
counts = [library.num_threads for library in libraries]
began, end = threading.Event(), threading.Event()

def hold():
    began.set()
    end.wait()

thread = threading.Thread(
    target=lambda: workers.each([0], lambda _, item: hold()), daemon=True
)
thread.start()
began.wait()

def act():
    assert [library.num_threads for library in libraries] == counts
    seen = []
    workers.each(range(50), lambda _, item: seen.append(item))
    assert sorted(seen) == list(range(50))
    assert [library.num_threads for library in libraries] == counts

assert in_child(act) == 0
assert {library.num_threads for library in libraries} <= {1}
end.set()
thread.join()
assert [library.num_threads for library in libraries] == counts
""")


def test_a_child_uses_more_than_one_thread():
    run("""
from mucudnn.backends.cpu.threads import Workers
workers = Workers(2)
workers.each(range(50), lambda _, item: None)

def act():
    met = threading.Barrier(2, timeout=250)  # passed by two threads or not at all
    workers.each(range(2), lambda _, item: met.wait())

assert in_child(act) == 0
""")


def test_a_fork_inside_a_convolution_leaves_it_whole():
    run("""
from mucudnn.backends.cpu.threads import Workers
workers = Workers(2)
libraries = workers._blas._libraries
counts = [library.num_threads for library in libraries]
statuses, main = [], threading.main_thread()

def act():
    seen = []
    workers.each(range(9), lambda _, item: seen.append(item))
    assert sorted(seen) == list(range(9))

child = None
def item(worker, item):
    global child
    if worker == 0 and child is None:
        child = os.fork()
workers.each(range(20), item, at_most=1)
assert [library.num_threads for library in libraries] == counts
act()
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def test_copies_are_refused_or_made_and_never_waited_for_in_vain():
    run("""
from mucudnn.backends.cpu.device import CpuCopier
from mucudnn.errors import BackendError
began, end = threading.Event(), threading.Event()

def slow(source, target):
    began.set()
    end.wait()
    target[...] = source

copier = CpuCopier(slow)
a, b = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
pending = copier.prebind("out", a, b)()
began.wait()

def act():
    try:
        copier.wait(pending)
    except BackendError as e:
        assert "forked" in str(e)
    else:
        raise AssertionError("waited for what is not made")
    end.set()
    c = np.zeros(8, np.uint8)
    copier.wait(copier.prebind("out", a, c)())
    copier.finish()
    assert (c == a).all()
    copier.close()

assert in_child(act) == 0
end.set()
copier.wait(pending)
assert (b == a).all()
copier.close()
""")


def test_a_loader_goes_on_in_a_child_and_in_the_parent():
    run("""
import gc
from mucudnn.data.loader import ordered_map

def make(job):
    time.sleep(0.001)
    return job * job

for turn in range(10):
    results = ordered_map(make, range(60), workers=3, depth=6)
    first = [next(results) for _ in range(turn)]

    def act():
        assert [*first, *results] == [job * job for job in range(60)]

    def leave():
        results.close()
        gc.collect()

    assert in_child(act) == 0
    assert in_child(leave) == 0
    assert [*first, *results] == [job * job for job in range(60)]
""")


def test_a_child_leaves_its_parents_measuring_process_alone():
    run("""
tuner = mucudnn.Tuner(backend="null", cache=None, rule=QUICK, isolate=True)
layer = lambda c: parse_problem(f"n=2,c={c},h=6,w=6,k=3,r=3,s=3")
tuner.plan([layer(1)])
(process,) = tuner._isolation._children.values()
pid = process.pid

def act():
    assert process.pid is None
    tuner.plan([layer(2)])
    assert process.pid not in (None, pid)
    tuner.close()

assert in_child(act) == 0
assert in_child(tuner.close) == 0
tuner.plan([layer(3)])
assert process.pid == pid
tuner.close()
""")


def test_a_parent_that_held_the_lock_itself_still_holds_it():
    run("""
from mucudnn.processes import PerProcess
lock = PerProcess(threading.RLock)
with lock.value:
    child = os.fork()
    with lock.value:
        pass
if child == 0:
    with lock.value:
        os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def test_threads_that_ask_at_once_get_one_value():
    own = PerProcess(object)
    meet = threading.Barrier(8)

    def ask(_):
        meet.wait()
        return own.value

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len({id(value) for value in found}) == 1
