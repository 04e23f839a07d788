"""Time kernels on the workers of an executor; their rows arrive one by one.

Any PEP 3148 executor serves whose workers have a device of the same model: a process
pool, `mpi4py.futures`, dask's `Client.get_executor()`. Only this process writes to the
cache. One task is one micro-batch size of one layer, so that a worker allocates its
buffers once and stops early on slow algorithms, as a single device would. If a worker
dies, its task is measured here, once, in a child process: a kernel that kills its
process becomes a failed row.
"""

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import dataclass
from typing import Any

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs import (
    perf_from_dict,
    perf_to_dict,
    problem_from_dict,
    problem_to_dict,
)
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.processes import SIGNALS, Own
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import BenchTask, KernelBench
from mucudnn.runtime.tuning.tables import SizeRun, Sizes, TableFiller
from mucudnn.runtime.tuning.timing import StoppingRule

Message = dict[str, Any]


logger = logging.getLogger(__name__)


_LATE_S = 60.0
"""Seconds beyond the time limit after which workers are no longer waited for."""


Wait = Callable[..., Any]
"""Type of `concurrent.futures.wait`; tests replace it."""


@dataclass(frozen=True, slots=True)
class Round:
    """Sizes of one table that may be timed concurrently."""

    filler: TableFiller
    sizes: Sizes


class Workers:
    """An executor whose workers measure in other processes or on other machines.

    Args:
        executor: The executor; the caller shuts it down.
        isolate: Whether workers measure in child processes of theirs; None does so for
            backends that may crash.
    """

    def __init__(
        self, executor: Executor, isolate: bool | None = None, *, wait: Wait = wait
    ) -> None:
        if not isinstance(executor, Executor):
            raise TypeError(
                f"executor is {executor!r}; give a concurrent.futures.Executor, such "
                "as ProcessPoolExecutor(4), mpi4py.futures.MPIPoolExecutor() or "
                "dask.distributed.Client(…).get_executor()"
            )
        self.executor = executor
        self.isolate = isolate
        self.wait = wait

    def fill(self, chains: Sequence[Iterator[Round]]) -> None:
        """Measure the rounds of all chains, those of each chain one after another.

        On every exit, Ctrl-C included, finished rows are kept.

        Raises:
            ValueError: A worker has a device of another model, or other libraries.
            BackendUnavailableError: A worker cannot load the backend, or the executor
                takes no tasks.
        """
        _Dispatch(self).run(chains)


@dataclass(frozen=True, slots=True)
class _Sent:
    chain: Iterator[Round]
    filler: TableFiller
    size: SizeRun

    @property
    def flops(self) -> float:
        """Number of floating-point operations of the task."""
        problem = self.filler.task.problem.with_batch(self.size.batch)
        return problem.flops * len(self.size.workspaces)


class _Dispatch:
    """The pending tasks of one call of `Workers.fill`.

    Long tasks are started first, as the others would wait for them at the end. So
    second rounds wait until all first rounds, which are short, have returned.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._broken = False
        self._ready: list[_Sent] = []
        self._sent: dict[Future[Message], _Sent] = {}
        self._open: dict[Iterator[Round], int] = {}
        self._first: set[Iterator[Round]] = set()
        self._isolation = Isolation(True)
        self._benches: dict[TableFiller, KernelBench] = {}

    def run(self, chains: Sequence[Iterator[Round]]) -> None:
        try:
            for chain in chains:
                self._advance(chain)
            self._first = {chain for chain in chains if self._open.get(chain)}
            self._send()
            while self._sent:
                for future in self._wait():
                    self._receive(future)
                if not (self._first and self._sent):
                    self._send()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._isolation.close()

    def _advance(self, chain: Iterator[Round]) -> None:
        """Make the next round of a chain ready."""
        self._first.discard(chain)
        if (todo := next(chain, None)) is not None:
            for batch, algos in todo.sizes:
                size = todo.filler.size(batch, algos)
                self._ready.append(_Sent(chain, todo.filler, size))
            self._open[chain] = len(todo.sizes)

    def _send(self) -> None:
        while self._ready:
            self._ready.sort(key=lambda sent: sent.flops)
            sent = self._ready.pop()
            if (future := self._submitted(sent)) is None:
                self._measure_here(sent)
                self._settle(sent)
            else:
                self._sent[future] = sent

    def _settle(self, sent: _Sent) -> None:
        """Count a finished task; the last one of a round advances its chain."""
        self._open[sent.chain] -= 1
        if not self._open[sent.chain]:
            self._advance(sent.chain)

    def _submitted(self, sent: _Sent) -> Future[Message] | None:
        """Submit a task; return its future, or None if the executor is broken."""
        if self._broken:
            return None
        try:
            return self._workers.executor.submit(measure_size, self._message(sent))
        except BrokenExecutor as e:
            self._broken = True
            logger.warning("the executor is broken (%s); it is measured here", e)
            return None
        except RuntimeError as e:
            raise BackendUnavailableError(
                f"the executor takes no tasks: {e}; give one that is open"
            ) from e

    def _message(self, sent: _Sent) -> Message:
        task = sent.filler.task
        left_s = task.deadline - task.clock()
        return {
            "backend": task.backend.name,
            "index": task.backend.index,
            "fingerprint": task.backend.device.fingerprint,
            "problem": problem_to_dict(task.problem),
            "rule": dataclasses.asdict(task.rule),
            "memory_limit": task.memory_limit,
            "until": time.time() + left_s,  # monotonic clocks differ between machines
            "isolate": self._workers.isolate,
            "size": dataclasses.asdict(sent.size),
        }

    def _wait(self) -> Sequence[Future[Message]]:
        """Return finished futures, or all cancelled ones if workers are too late."""
        task = next(iter(self._sent.values())).filler.task
        seconds = None
        if math.isfinite(task.deadline):
            seconds = max(0.0, task.deadline - task.clock()) + _LATE_S
        done, late = self._workers.wait(self._sent, seconds, FIRST_COMPLETED)
        if done:
            return [future for future in self._sent if future in done]
        for future in late:
            future.cancel()
        return list(late)

    def _receive(self, future: Future[Message]) -> None:
        sent = self._sent.pop(future)
        try:
            answer = future.result(timeout=0)
        except ImportError as e:
            raise BackendUnavailableError(
                f"a worker of the executor has no mucudnn that can measure: {e}"
            ) from e
        except Exception as e:  # executors report lost workers by any exception
            self._broken |= isinstance(e, BrokenExecutor)
            logger.warning(
                "a worker was lost (%s: %s); its measurements of %s are made here",
                *(type(e).__name__, e, sent.filler.task.problem),
            )
            self._measure_here(sent)
        else:
            self._keep(answer, sent)
        self._settle(sent)

    def _keep(self, answer: Message, sent: _Sent) -> None:
        backend = sent.filler.task.backend
        if (reason := answer.get("unavailable")) is not None:
            raise BackendUnavailableError(
                f"the worker {answer['where']} cannot measure on backend "
                f"{backend.name!r}: {reason}"
            )
        mine, other = backend.device.fingerprint, answer["fingerprint"]
        refuse_other_model(mine, other, f" of the worker {answer['where']}")
        for row in answer["rows"]:
            sent.filler.keep(perf_from_dict(row))

    def _measure_here(self, sent: _Sent) -> None:
        filler = sent.filler
        bench = self._benches.get(filler)
        if bench is None:
            bench = self._benches[filler] = self._isolation.bench(filler.task)
        filler.measure(bench, sent.size)
        bench.release()

    def _give_up(self) -> None:
        """Keep the finished rows and cancel all other tasks."""
        for future, sent in self._sent.items():
            if future.cancel() or not future.done():
                continue
            with contextlib.suppress(Exception):  # the original error is being raised
                self._keep(future.result(timeout=0), sent)


def refuse_other_model(mine: str, other: str, whose: str = "") -> None:
    """Raise `ValueError` where rows of one device do not apply to the other."""
    if other != mine:
        raise ValueError(
            f"measurements do not carry over between {mine!r} and {other!r}{whose}; "
            "use devices of one model, with the same libraries"
        )


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Yield a pool of measuring processes on this machine, which ignore Ctrl-C.

    The processes are spawned, not forked, as a device's context does not survive a
    fork.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_ignore_interrupts
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# The task of an executor's worker: time one micro-batch size.
#
# Requests and answers are plain values as written by `mucudnn.codecs`, so that a worker
# with another version of this library can at least be rejected. A request: `{"backend":
# "cpu", "index": 0, "fingerprint": …, "problem": …, "rule": …, "memory_limit": …,
# "until": …, "isolate": …, "size": {"batch": 8, "workspaces": …, "best_ms": …,
# "expected_ms": …}}`, with `until` in seconds since 1970. An answer: `{"where": "host,
# process 7", "fingerprint": …, "rows": […]}`, or `"unavailable": "…"` with the reason.


def measure_size(request: Message) -> Message:
    """Time the requested algorithms on this process's device."""
    where = f"{platform.node()}, process {os.getpid()}"
    try:
        answer = _station.mine.measure(request)
    except (BackendUnavailableError, ValueError) as e:
        answer = {"unavailable": str(e)}
    return {"where": where, **answer}


class _Station:
    """The devices of a worker process, which time one kernel at a time.

    Some executors run several threads per worker, hence the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backends: dict[tuple[str, int], Backend] = {}
        self._isolations: dict[bool | None, Isolation] = {}

    def measure(self, request: Message) -> Message:
        """Return the rows of a request; none if it is for another device model."""
        with self._lock:
            device = request["backend"], request["index"]
            if device not in self._backends:
                self._backends[device] = get_backend(*device)
            backend = self._backends[device]
            fingerprint = backend.device.fingerprint
            rows = []
            if fingerprint == request["fingerprint"]:
                rows = self._rows(backend, request)
        return {"fingerprint": fingerprint, "rows": [perf_to_dict(r) for r in rows]}

    def _rows(self, backend: Backend, request: Message) -> list[AlgoPerf]:
        isolate = request["isolate"]
        isolation = self._isolations.setdefault(isolate, Isolation(isolate))
        task = BenchTask(
            backend=backend,
            problem=problem_from_dict(request["problem"]),
            rule=StoppingRule(**request["rule"]),
            memory_limit=request["memory_limit"],
            deadline=time.monotonic() + request["until"] - time.time(),
        )
        bench = isolation.bench(task)
        rows: list[AlgoPerf] = []
        try:
            bench.run(**request["size"], on_done=rows.append)
        finally:
            bench.release()
        return rows


_station = Own(_Station)
"""State of this process between tasks; an executor's task is a bare function."""
