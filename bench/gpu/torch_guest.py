"""Planned PyTorch steps on this GPU: the same numbers as eager ones, peaks, and times.

A small GPT and ResNet-18 are trained by `mucudnn.torch.train_step` and under
`torch.compile` by `mucudnn.torch.backend`, without a limit and in half of the bytes
that a plan can save. Each is a section that is asked once and written by itself: losses
and parameters beside those of eager mode, what PyTorch's allocator had in use at most
beside what was planned, and times that take turns. Those without a limit come first.

PyTorch's algorithms are the deterministic ones wherever it has them, for both.
"""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from bench.gpu.job import Job, Report
from bench.gpu.sections import all_answered, asked
from bench.gpu.torch_guest_steps import Guest, Sizes
from bench.table import render

__all__ = ["FILES", "SECTIONS", "missing", "run"]

_RESULT = "torch.json"
FILES = (_RESULT,)

SECTIONS = tuple(
    (network, way, limited)
    for limited in (False, True)
    for network in ("gpt", "resnet18")
    for way in ("train_step", "backend")
)
"""Network, how it is planned, and whether within a budget."""

_WORTH_S = 2.0
_DEVICES = {"cuda": "cuda", "cpu": "cpu"}
_PEAK = 1.05
"""Of the planned bytes: what the allocator may have in use, which rounds up."""


def run(job: Job) -> Report:
    """Every section that has no answer yet."""
    reason = missing(job.backend_name)
    if reason is not None:
        job.write(_RESULT, {"torch": reason, "sections": {}})
        return Report(True, (), reason)
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    sections = asked(
        job,
        _RESULT,
        {_name(*one): partial(_answer, job, *one) for one in SECTIONS},
        worth_s=_WORTH_S,
        head={"torch": torch.__version__, "deterministic": True},
        works=partial(_device_works, job),  # another process can go on with the others
    )
    failures = tuple(
        f"{name}: {said}" for name, entry in sections.items() for said in _wrong(entry)
    )
    complete = all_answered(sections, [_name(*one) for one in SECTIONS])
    return Report(complete, failures, f"torch {torch.__version__}\n{_text(sections)}")


def missing(backend_name: str) -> str | None:
    """Why nothing can be asked."""
    kind = _DEVICES.get(backend_name.partition(":")[0])
    if kind is None:
        return f"left out: PyTorch has no device like {backend_name}"
    # cuBLAS is deterministic with workspaces that it is given before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        import torch
    except ImportError as e:
        return f"left out: PyTorch is not installed: {e}"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"left out: PyTorch {torch.__version__} sees no CUDA device"
    return None


def _answer(job: Job, network: str, way: str, limited: bool) -> dict[str, Any]:
    sizes = Sizes.small(job.batch) if job.layers else Sizes.of(job.batch)
    device = _DEVICES[job.backend_name.partition(":")[0]]
    return Guest(network, way, sizes, device).measured(limited, job.deadline)


def _device_works(job: Job) -> bool:
    """Whether what went wrong, if anything, has left the CUDA context usable."""
    if not job.backend_name.startswith("cuda"):
        return True
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:  # it is of the context, and stays
        return False
    return True


def _wrong(entry: Mapping[str, Any]) -> list[str]:
    """What a section says that must not be."""
    if entry["state"] != "done":
        return [entry.get("error", "it has not ended")]
    found = []
    if entry["eager_repeats"] and entry["difference"]:
        found.append(
            f"differs from eager mode by {entry['difference']:.2g}, which repeats "
            "itself bit for bit"
        )
    elif entry["difference"] > 10 * entry["eager_difference"]:
        found.append(
            f"differs from eager mode by {entry['difference']:.2g}; two eager runs by "
            f"{entry['eager_difference']:.2g}"
        )
    if entry["peak_bytes"] > _PEAK * entry["planned_bytes"]:
        found.append(
            f"{entry['peak_bytes']} bytes in use, {entry['planned_bytes']} planned"
        )
    return found


def _name(network: str, way: str, limited: bool) -> str:
    return f"{network} {way}{' in half' if limited else ''}"


def _text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("difference", "peak_bytes", "planned_bytes", "eager_bytes")
    times = ("ms", "eager_ms")
    rows = [
        (
            name,
            entry["state"],
            *(entry.get(column) for column in (*columns, *times)),
        )
        for name, entry in sections.items()
    ]
    return render(("section", "state", *columns, *times), rows)
