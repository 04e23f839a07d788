"""What convinces a PyTorch user, measured first of all: faces, numbers, bytes, times.

Sections in the order that is most worth having, each asked once and written by itself:
every face runs; parameters and buffers after many steps equal eager mode's at three
budgets; PyTorch's sanitizer sees no race; requested, allocated and reserved bytes stay
within what is promised; the largest batch within a memory limit; time against budget,
beside what PyTorch offers; what the GPU waits for; planned steps of Inductor's kernels.

Sections that change how PyTorch allocates, or may leave the device unusable, run in a
process of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu.job import Job, Report
from bench.gpu.pytorch_steps import (
    batch_limits,
    compiled,
    faces,
    memory,
    numbers,
    sanitized,
    times,
    trace,
)
from bench.gpu.sections import UnfinishedError, all_answered, asked
from bench.gpu.torch_guest import missing
from bench.table import render

_RESULT, _BUDGETS = "pytorch.json", "pytorch-budgets.json"
FILES = (_RESULT, _BUDGETS)
_WORTH_S = 5.0

Section = Callable[..., dict[str, Any]]

SECTIONS: Mapping[str, tuple[Section, tuple[Any, ...], Mapping[str, str]]] = {
    "faces": (faces, (), {}),
    **{f"numbers {name}": (numbers, (name,), {}) for name in ("gpt", "resnet18")},
    "sanitizer": (sanitized, (), {}),
    **{
        f"memory {name}, {words}": (memory, (name,), {"PYTORCH_CUDA_ALLOC_CONF": conf})
        for name in ("gpt2", "resnet50")
        for words, conf in (
            ("default allocator", ""),
            ("expandable segments", "expandable_segments:True"),
        )
    },
    **{f"largest batch {name}": (batch_limits, (name,), {}) for name in ("resnet50",)},
    **{f"times {name}": (times, (name,), {}) for name in ("gpt2", "resnet50")},
    "trace": (trace, ("gpt2",), {}),
    "compiled": (compiled, ("gpt2",), {}),
}
"""Name -> what is run, on which network, with which environment."""


def run(job: Job) -> Report:
    """Ask every section that has no answer yet."""
    reason = missing(job.backend_name)
    if reason is not None:
        job.write(_RESULT, {"torch": reason, "sections": {}})
        return Report(True, (), reason)
    sections = asked(
        job,
        _RESULT,
        {name: partial(_answer, job, name) for name in SECTIONS},
        worth_s=_WORTH_S,
    )
    failures = tuple(
        f"{name}: {wrong}"
        for name, entry in sections.items()
        for wrong in (entry.get("wrong") or ())
        if entry["state"] == "done"
    ) + tuple(
        f"{name}: {entry['error']}"
        for name, entry in sections.items()
        if entry["state"] == "failed"
    )
    return Report(all_answered(sections, SECTIONS), failures, _text(sections))


def _answer(job: Job, name: str) -> dict[str, Any]:
    """Run a section in a process of its own.

    Raises:
        UnfinishedError: It did not end in time.
        RuntimeError: It failed; says how.
    """
    device = job.backend_name.partition(":")[0]
    command = sys.executable, "-m", "bench.gpu.pytorch", name, device
    small = ("small",) if job.layers else ()
    try:
        done = subprocess.run(
            (*command, *small),
            env={**os.environ, "BUDGETS": str(job.out / _BUDGETS), **SECTIONS[name][2]},
            capture_output=True,
            text=True,
            timeout=max(1.0, job.left_s),
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise UnfinishedError from e
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:] or f"status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (name, entry["state"], entry.get("seconds"), len(entry.get("wrong") or ()))
        for name, entry in sections.items()
    ]
    return render(("section", "state", "seconds", "wrong"), rows)


def _main() -> None:
    name, device, *small = sys.argv[1:]
    function, arguments, _ = SECTIONS[name]
    print(json.dumps(function(*arguments, device, small=bool(small))))


if __name__ == "__main__":
    _main()
