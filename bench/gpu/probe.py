"""What this GPU is, and the questions that only it can answer.

Sections are asked one after another and written each by itself. One that took the
process with it is not asked again, unless everything is.
"""

import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from bench.gpu.halves import half_sums
from bench.gpu.job import Job, Report
from bench.gpu.kernels import accumulating, first_api
from bench.gpu.launches import launches
from bench.gpu.library_kernels import library_kernels
from bench.gpu.listing import compared_listings
from bench.gpu.packages import lacking
from bench.gpu.store import read_json, write_text
from mucudnn.backends.cuda.conv import CudaConv
from mucudnn.backends.cuda.session import LiveSession, describe_device
from mucudnn.errors import MucudnnError

__all__ = ["FILES", "run"]

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
    sections: dict[str, Any] = read_json(job.out / _RESULT).get("sections", {})
    for name, entry in sections.items():
        if entry["state"] == "begun":
            sections[name] = {"state": "failed", "error": "the process ended during it"}
    for name, ask in _SECTIONS.items():
        if name in sections:
            continue
        if job.left_s < _WORTH_S:
            break
        sections[name] = {"state": "begun"}
        job.write(_RESULT, {"sections": sections})
        sections[name] = _answer(job, ask)
        job.write(_RESULT, {"sections": sections})
        job.keep()
    failures = [
        f"{name}: {entry['error']}"
        for name, entry in sections.items()
        if entry["state"] == "failed"
    ]
    return Report(set(sections) == set(_SECTIONS), tuple(failures), _text(sections))


def _answer(job: Job, ask: Callable[[Job], Mapping[str, Any]]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        found = {"state": "done", "result": ask(job)}
    except Exception as e:  # a section must not cost the others
        if not isinstance(e, MucudnnError):
            traceback.print_exc()
        found = {"state": "failed", "error": f"{type(e).__name__}: {e}"}
    return {**found, "seconds": time.monotonic() - begun}


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
        return {"exit_status": done.returncode, "said": done.stderr[-2000:]}
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
