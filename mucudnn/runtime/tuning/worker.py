"""The task of an executor's worker: time one micro-batch size.

Requests and answers are plain values as written by `mucudnn.codecs`, so that a worker
with another version of this library can at least be rejected. A request: `{"backend":
"cpu", "index": 0, "fingerprint": …, "problem": …, "rule": …, "memory_limit": …,
"until": …, "isolate": …, "size": {"batch": 8, "workspaces": …, "best_ms": …,
"expected_ms": …}}`, with `until` in seconds since 1970. An answer: `{"where": "host,
process 7", "fingerprint": …, "rows": […]}`, or `"unavailable": "…"` with the reason.
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
