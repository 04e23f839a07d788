"""What this GPU is, and the questions that only it can answer.

Sections are asked one after another and written each by itself (`bench.gpu.sections`).
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu.job import Job, Report, write_text
from bench.gpu.kernels import accumulating, first_api, half_sums, library_kernels
from bench.gpu.launches import launches
from bench.gpu.listing import compared_listings
from bench.gpu.packages import lacking
from bench.gpu.sections import all_answered, asked
from mucudnn.backends.cuda.conv import CudaConv
from mucudnn.backends.cuda.descriptors import LiveSession, describe_device
from mucudnn.errors import BackendError

_RESULT = "probe.json"
DEVICE = "device.json"
FILES = (_RESULT, DEVICE, "info.json")

_WORTH_S = 1.0
_SMI_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm"),
    *("power.draw", "temperature.gpu", "memory.used", "memory.total"),
)


def run(job: Job) -> Report:
    """Every section that has no answer yet."""
    asks = {name: partial(_answer, ask, job) for name, ask in _SECTIONS.items()}
    sections = asked(job, _RESULT, asks, worth_s=_WORTH_S)
    failures = [
        f"{name}: {entry['error']}"
        for name, entry in sections.items()
        if entry["state"] == "failed"
    ]
    complete = all_answered(sections, _SECTIONS)
    return Report(complete, tuple(failures), _text(sections))


def _answer(ask: Callable[[Job], Mapping[str, Any]], job: Job) -> Mapping[str, Any]:
    return {"result": ask(job)}


def _packages(job: Job) -> Mapping[str, Any]:
    """What is not installed, and what that costs."""
    missing = lacking()
    said = [f"{package} is missing ({cost})" for package, cost in missing.items()]
    return {"missing": missing, "text": "; ".join(said) or "all are here"}


def _device(job: Job) -> Mapping[str, Any]:
    """The description that cuDNN writes of the device, kept as a file."""
    conv = job.backend.conv
    if not isinstance(conv, CudaConv):
        return {"skipped": f"backend {job.backend_name} has no such description"}
    if not isinstance(conv.session, LiveSession):
        return {"skipped": "the device is only described"}
    text = describe_device(conv.session.calls, job.backend.index)
    write_text(job.out / DEVICE, text)
    return {"file": DEVICE, "bytes": len(text)}


def _info(job: Job) -> Mapping[str, Any]:
    file = job.out / "info.json"
    done = subprocess.run(
        [sys.executable, "-m", "mucudnn", "info", "--cache", "none", "--json", file],
        capture_output=True,
        text=True,
        timeout=max(1.0, job.left_s),
        check=False,
    )
    if done.returncode:
        raise BackendError(f"it ended with {done.returncode}: {done.stderr[-2000:]}")
    return {"file": file.name}


def _clocks(job: Job) -> Mapping[str, Any]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"skipped": "there is no nvidia-smi"}
    done = subprocess.run(
        [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=max(1.0, job.left_s),
        check=False,
    )
    values = [value.strip() for value in done.stdout.split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False))


def _listing(job: Job) -> Mapping[str, Any]:
    return compared_listings(job, job.out / DEVICE)


_SECTIONS: Mapping[str, Callable[[Job], Mapping[str, Any]]] = {
    "packages": _packages,
    "device": _device,
    "info": _info,
    "clocks": _clocks,
    "listing": _listing,
    "launches": launches,
    "half_sums": half_sums,
    "accumulating": accumulating,
    "library_kernels": library_kernels,
    "clocks_after": _clocks,
    "first_api": first_api,
}
"""Those that can harm the process come last."""


def _text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, entry in sections.items():
        result = entry.get("result", {})
        said = result.get("skipped") or result.get("text") or entry.get("error") or ""
        lines.append(f"{name}: {entry['state']} {said}".rstrip())
    return "\n".join(lines)
