"""The child's side of measuring in a process of its own.

JSON lines come in where stdin was and go out where stdout was. Both are taken away at
the start: a library that prints or reads meets stderr and an empty file instead.
Numbers may be `Infinity`, for both ends are Python.

Parent to child::

    {"open": {"problem": …, "rule": …, "memory_limit": …, "left_s": …}}
    {"run": {"batch": 8, "algo": "GEMM", "nbytes": 0, "best_ms": …, "expected_ms": …}}
    {"release": true}

Child to parent: `{"ready": true}` once, or `{"unavailable": "…"}`; then for each `run`
first `{"begins": "GEMM"}` and in the end `{"row": …}`.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs.values import perf_to_dict, problem_from_dict
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.runtime.interrupts import SIGNALS
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench, failed_perf
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["main"]

logger = logging.getLogger(__name__)

Message = dict[str, Any]


def main() -> None:
    """Answer requests until the parent closes its end, or is gone.

    `sys.argv` ends with the backend's name and the number of its device.
    """
    for number in SIGNALS:  # they reach a whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    name, index = sys.argv[-2:]
    incoming, outgoing = _take_standard_streams()
    requests = _requests(incoming)

    def reply(message: Message) -> None:
        outgoing.write(json.dumps(message).encode() + b"\n")

    try:
        backend = get_backend(name, int(index))
    except (MucudnnError, ValueError) as e:
        reply({"unavailable": str(e)})
        return
    reply({"ready": True})
    _serve(backend, requests, reply)


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout, which no library and no child inherits."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _requests(incoming: BinaryIO) -> Iterator[Message]:
    """What the parent asks; at the end of it the process ends, whatever it is at."""
    waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def listen() -> None:
        for line in incoming:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return iter(waiting.get, None)


def _serve(
    backend: Backend, requests: Iterator[Message], reply: Callable[[Message], None]
) -> None:
    bench: KernelBench | None = None
    problem: ConvProblem | None = None
    for request in requests:
        match request:
            case {"open": opened}:
                bench = None  # its buffers first
                problem = problem_from_dict(opened["problem"])
                task = BenchTask(
                    backend=backend,
                    problem=problem,
                    rule=StoppingRule(**opened["rule"]),
                    memory_limit=opened["memory_limit"],
                    deadline=time.monotonic() + opened["left_s"],
                )
                bench = KernelBench(task)
            case {"run": kernel} if bench is not None and problem is not None:
                reply({"begins": kernel["algo"]})
                micro = problem.with_batch(kernel["batch"])
                row = _time(backend, bench, micro, kernel)
                reply({"row": perf_to_dict(row)})
            case {"release": _} if bench is not None:
                bench.release()


def _time(
    backend: Backend, bench: KernelBench, problem: ConvProblem, kernel: Message
) -> AlgoPerf:
    """One row; even what a bench lets through costs only this one."""
    algo, nbytes = kernel["algo"], kernel["nbytes"]
    rows: list[AlgoPerf] = []
    try:
        bench.run(
            problem.batch,
            {algo: nbytes},
            rows.append,
            kernel["best_ms"],
            {algo: kernel["expected_ms"]},
        )
    except Exception as e:
        logger.warning("%s failed on %s", algo, problem, exc_info=True)
        traits = backend.conv.traits(problem, algo)
        return failed_perf(problem, algo, nbytes, f"{type(e).__name__}: {e}", traits)
    return rows[0]
