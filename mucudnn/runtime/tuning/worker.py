"""What a worker of an executor is asked to do: time one micro-batch size.

Requests and answers are made of plain values, as `mucudnn.codecs` writes them, so that
a worker with another version of this library understands enough to be refused. A
request: `{"backend": "cpu", "index": 0, "fingerprint": …, "problem": …, "rule": …,
"memory_limit": …, "until": …, "isolate": …, "size": {"batch": 8, "workspaces": …,
"best_ms": …, "expected_ms": …}}`, `until` in seconds since 1970. An answer:
`{"where": "host, process 7", "fingerprint": …, "rows": […]}`, or `"unavailable": "…"`
and why.
"""

import os
import platform
import threading
import time
from typing import Any

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs.values import perf_to_dict, problem_from_dict
from mucudnn.errors import BackendUnavailableError
from mucudnn.forks import Own
from mucudnn.ir.conv import AlgoPerf
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_bench import BenchTask
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["Message", "measure_size"]

Message = dict[str, Any]


def measure_size(request: Message) -> Message:
    """Time the algorithms that are asked for, on this process's device."""
    where = f"{platform.node()}, process {os.getpid()}"
    try:
        answer = _station.mine.measure(request)
    except (BackendUnavailableError, ValueError) as e:
        answer = {"unavailable": str(e)}
    return {"where": where, **answer}


class _Station:
    """The devices of a process, on which one kernel is timed at a time.

    Some executors have several threads a worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backends: dict[tuple[str, int], Backend] = {}
        self._isolations: dict[bool | None, Isolation] = {}

    def measure(self, request: Message) -> Message:
        """The rows of a request, or the device that it is not for.

        Raises:
            BackendUnavailableError: The backend, or a child to measure in, is missing.
            ValueError: There is no such backend or device.
        """
        with self._lock:
            backend = self._backend(request["backend"], request["index"])
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

    def _backend(self, name: str, index: int) -> Backend:
        if (name, index) not in self._backends:
            self._backends[name, index] = get_backend(name, index)
        return self._backends[name, index]


_station = Own(_Station)
"""A task is a bare function: what a process keeps between two has no other home."""
