"""Time kernels on the workers of an executor; their rows arrive one by one.

Any PEP 3148 executor serves whose workers have a device of the same model: a process
pool, `mpi4py.futures`, dask's `Client.get_executor()`. Only this process writes to the
cache. One task is one micro-batch size of one layer, so that a worker allocates its
buffers once and stops early on slow algorithms, as a single device would. If a worker
dies, its task is measured here, once, in a child process: a kernel that kills its
process becomes a failed row.

A task is `answer`, called with plain values, so that a worker with another version of
this library can at least be rejected: `{"backend": "cpu", "index": 0, "fingerprint": …,
"isolate": …, "size": …}`, of which `size` is a `SizeRequest`. It returns `{"where":
"host, process 7", "fingerprint": …, "rows": […]}`, or `"unavailable": "…"` with the
reason.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import platform
import signal
import threading
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
from mucudnn.codecs import decode_perf, perf_to_dict
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.processes import SIGNALS, PerProcess
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import Message, SizeRequest, measure_size
from mucudnn.runtime.tuning.tables import Sizes, TableFiller

logger = logging.getLogger(__name__)

_LATE_S = 60.0
"""Seconds beyond the time limit after which workers are no longer waited for."""

Wait = Callable[..., Any]
"""Type of `concurrent.futures.wait`; tests replace it."""

Round = tuple[TableFiller, Sizes]
"""Sizes of one table that may be timed concurrently."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A pending task, with the table and the chain of rounds that it belongs to."""

    chain: Iterator[Round]
    filler: TableFiller
    request: SizeRequest


class Workers:
    """An executor whose workers measure in other processes or on other machines.

    Args:
        executor: The executor; the caller shuts it down.
        isolate: Whether workers measure in child processes of theirs; None does so for
            backends that may crash.

    Long tasks are started first, as the others would wait for them at the end. So
    second rounds wait until all first rounds, which are short, have returned.
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
        self._executor = executor
        self._isolate = isolate
        self._await = wait
        self._broken = False
        self._ready: list[_Sent] = []
        self._sent: dict[Future[Message], _Sent] = {}
        self._open: dict[Iterator[Round], int] = {}
        self._first: set[Iterator[Round]] = set()
        self._isolation = Isolation(True)

    def fill(self, chains: Sequence[Iterator[Round]]) -> None:
        """Measure the rounds of all chains; rounds of one chain run in sequence.

        On every exit, Ctrl-C included, finished rows are kept.

        Raises:
            ValueError: A worker has a device of another model, or other libraries.
            BackendUnavailableError: A worker cannot load the backend, or the executor
                takes no tasks.
        """
        self._broken = False
        for pending in (self._ready, self._sent, self._open):
            pending.clear()
        try:
            for chain in chains:
                self._advance(chain)
            self._first = {chain for chain in chains if self._open.get(chain)}
            self._send()
            while self._sent:
                limits = next(iter(self._sent.values())).request.limits
                seconds = None
                if math.isfinite(limits.deadline):
                    seconds = max(0.0, limits.left_s) + _LATE_S
                done, late = self._await(self._sent, seconds, FIRST_COMPLETED)
                if not done:  # workers are too late: do without all of them
                    for future in late:
                        future.cancel()
                for future in [f for f in self._sent if f in (done or late)]:
                    self._receive(future)
                if not (self._first and self._sent):
                    self._send()
        except BaseException:
            # Keep the finished rows, and cancel all other tasks.
            for future, sent in self._sent.items():
                if not future.cancel() and future.done():
                    with contextlib.suppress(Exception):  # the original one is raised
                        self._keep(future.result(timeout=0), sent)
            raise
        finally:
            self._isolation.close()

    def _advance(self, chain: Iterator[Round]) -> None:
        """Make the next round of a chain ready."""
        self._first.discard(chain)
        if (todo := next(chain, None)) is not None:
            filler, sizes = todo
            for batch, algos in sizes:
                self._ready.append(_Sent(chain, filler, filler.request(batch, algos)))
            self._open[chain] = len(sizes)

    def _send(self) -> None:
        def flops(sent: _Sent) -> float:
            return sent.request.micro_batch.flops * len(sent.request.workspaces)

        while self._ready:
            # Longest first, so that no worker begins a long task when the others are
            # done.
            self._ready.sort(key=flops)
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
        backend = sent.filler.backend
        message = {
            "backend": backend.name,
            "index": backend.index,
            "fingerprint": backend.device.fingerprint,
            "isolate": self._isolate,
            "size": sent.request.to_message(),
        }
        try:
            return self._executor.submit(answer, message)
        except BrokenExecutor as e:
            self._broken = True
            logger.warning("the executor is broken (%s); measuring in this process", e)
            return None
        except RuntimeError as e:
            raise BackendUnavailableError(
                f"the executor takes no tasks: {e}; give one that is open"
            ) from e

    def _receive(self, future: Future[Message]) -> None:
        sent = self._sent.pop(future)
        try:
            reply = future.result(timeout=0)
        except ImportError as e:
            raise BackendUnavailableError(
                f"a worker of the executor has no mucudnn with which to measure: {e}"
            ) from e
        except Exception as e:  # executors report lost workers by any exception
            self._broken |= isinstance(e, BrokenExecutor)
            logger.warning(
                "a worker was lost (%s: %s); measuring %s in this process",
                *(type(e).__name__, e, sent.request.problem),
            )
            self._measure_here(sent)
        else:
            self._keep(reply, sent)
        self._settle(sent)

    def _keep(self, reply: Message, sent: _Sent) -> None:
        backend = sent.filler.backend
        if (reason := reply.get("unavailable")) is not None:
            raise BackendUnavailableError(
                f"the worker {reply['where']} cannot measure on backend "
                f"{backend.name!r}: {reason}"
            )
        mine, other = backend.device.fingerprint, reply["fingerprint"]
        refuse_other_model(mine, other, f" of the worker {reply['where']}")
        for row in reply["rows"]:
            sent.filler.keep(decode_perf("perf", row))

    def _measure_here(self, sent: _Sent) -> None:
        timer = self._isolation.timer(sent.filler.backend)
        measure_size(timer, sent.request, sent.filler.keep)
        timer.release()


def refuse_other_model(mine: str, other: str, whose: str = "") -> None:
    """Raise `ValueError` where rows of one device do not apply to the other."""
    if other != mine:
        raise ValueError(
            f"measurements of {mine!r} are not valid for {other!r}{whose}; use "
            "devices of one model, with the same libraries"
        )


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Yield a pool of measuring processes on this machine, which ignore Ctrl-C."""
    # Spawned, not forked: a device's context does not survive a fork.
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


class _Station:
    """The devices of a worker process, which time one kernel at a time.

    Some executors run several threads per worker, hence the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.backends: dict[tuple[str, int], Backend] = {}
        self.isolations: dict[bool | None, Isolation] = {}


_station = PerProcess(_Station)
"""State of this process between tasks; an executor's task is a bare function."""


def answer(message: Message) -> Message:
    """Time the requested algorithms, if this process's device is of that model."""
    where = f"{platform.node()}, process {os.getpid()}"
    station, rows = _station.value, list[AlgoPerf]()
    try:
        with station.lock:
            device = message["backend"], message["index"]
            if device not in station.backends:
                station.backends[device] = get_backend(*device)
            backend, isolate = station.backends[device], message["isolate"]
            fingerprint = backend.device.fingerprint
            if fingerprint == message["fingerprint"]:
                request = SizeRequest.from_message(message["size"])
                isolation = station.isolations.setdefault(isolate, Isolation(isolate))
                timer = isolation.timer(backend)
                try:
                    measure_size(timer, request, rows.append)
                finally:
                    timer.release()
        found = [perf_to_dict(row) for row in rows]
    except (BackendUnavailableError, ValueError) as e:
        return {"where": where, "unavailable": str(e)}
    return {"where": where, "fingerprint": fingerprint, "rows": found}
