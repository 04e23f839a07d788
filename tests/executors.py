"""An executor on a clock that is not real, and what workers are told at their start."""

import heapq
import os
import signal
from concurrent.futures import Executor, Future
from pathlib import Path

from mucudnn.codecs import decode_fields, decode_perf
from mucudnn.ir.conv import ConvProblem


def cost_ms(problem, row):
    """What a row took to measure, at a made-up speed for work that is real."""
    return problem.flops / 1e9 * row.time_ms / problem.batch * (row.samples + 1)


class VirtualWorkers(Executor):
    """Workers whose time is that of the rows they make; tasks are taken in turn.

    `wait` is what stands for `concurrent.futures.wait`: it lets time pass until the
    next task is over.
    """

    def __init__(self, many):
        self.free = [0.0] * many
        self.now_ms = 0.0
        self.work_ms = 0.0
        self._queue = []
        self._running = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self._queue.append((future, fn, args))
        return future

    def wait(self, futures, timeout, return_when):
        while self._queue and self.free:
            future, fn, args = self._queue.pop(0)
            answer = fn(*args)
            whole = decode_fields("problem", ConvProblem, args[0]["size"]["problem"])
            ms = sum(
                cost_ms(whole.with_batch(row.batch), row)
                for row in (decode_perf("perf", row) for row in answer["rows"])
            )
            self.work_ms += ms
            start = max(heapq.heappop(self.free), self.now_ms)
            entry = (start + ms, len(self._queue), id(future), future, answer)
            heapq.heappush(self._running, entry)
        self.now_ms, *_, future, answer = heapq.heappop(self._running)
        heapq.heappush(self.free, self.now_ms)
        future.set_result(answer)
        return {future}, set(futures) - {future}


def pretend_another_library():
    """A worker's initializer: there, another mucudnn is installed."""
    from mucudnn.backends.cpu import device

    device.installed_version = lambda: "0.0.1"


def die_once(folder):
    """A worker's initializer: the first to measure something dies of it."""
    from mucudnn.runtime.tuning import workers

    usual = workers.measure_size

    def run(*args, **kwargs):
        mark = Path(folder, "died")
        try:
            mark.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            usual(*args, **kwargs)

    workers.measure_size = run
