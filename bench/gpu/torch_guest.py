"""Planned PyTorch steps on this GPU: the same numbers as eager ones, peaks, and times.

A small GPT and ResNet-18 are trained by `mucudnn.torch.train_step` and under
`torch.compile` by `mucudnn.torch.backend`, without a limit and in half of the bytes
that a plan can save. Each is a section that is asked once and written by itself: losses
and parameters beside those of eager mode, what PyTorch's allocator had in use at most
beside what was planned, and times that take turns. Those without a limit come first.

PyTorch's algorithms are the deterministic ones wherever it has them, for both.
"""

import os
import time
import traceback
from collections.abc import Mapping
from typing import Any

from bench.gpu.job import Job, Report
from bench.gpu.store import read_json
from bench.gpu.torch_guest_steps import Guest, Sizes
from bench.table import render
from mucudnn.errors import MucudnnError

__all__ = ["FILES", "SECTIONS", "run"]

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
    reason = _missing(job.backend_name)
    if reason is not None:
        job.write(_RESULT, {"torch": reason, "sections": {}})
        return Report(True, (), reason)
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    sections: dict[str, Any] = read_json(job.out / _RESULT).get("sections", {})
    for name, entry in sections.items():
        if entry["state"] == "begun":
            sections[name] = {"state": "failed", "error": "the process ended during it"}
    head = {"torch": torch.__version__, "deterministic": True}
    for section in SECTIONS:
        name = _name(*section)
        if name in sections:
            continue
        if job.left_s < _WORTH_S:
            break
        sections[name] = {"state": "begun"}
        job.write(_RESULT, {**head, "sections": sections})
        sections[name] = _answer(job, *section)
        job.write(_RESULT, {**head, "sections": sections})
        job.keep()
        if not _device_works(job):  # another process can go on with the others
            break
    failures = tuple(
        f"{name}: {said}" for name, entry in sections.items() for said in _wrong(entry)
    )
    complete = len(sections) == len(SECTIONS)
    return Report(complete, failures, f"torch {torch.__version__}\n{_text(sections)}")


def _missing(backend_name: str) -> str | None:
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
    begun = time.monotonic()
    try:
        sizes = Sizes.small(job.batch) if job.layers else Sizes.of(job.batch)
        device = _DEVICES[job.backend_name.partition(":")[0]]
        guest = Guest(network, way, sizes, device)
        found = {"state": "done", **guest.measured(limited, job.deadline)}
    except Exception as e:  # a section must not cost the others
        if not isinstance(e, MucudnnError):
            traceback.print_exc()
        found = {"state": "failed", "error": f"{type(e).__name__}: {e}"}
    return {**found, "seconds": time.monotonic() - begun}


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
