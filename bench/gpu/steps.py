"""Our training steps beside PyTorch's: eager, channels last, half precision, compiled.

A section is a network in one precision and layout, which PyTorch has as well, in a
process of its own. Ours is timed launch by launch and as a CUDA graph, each in turn
with PyTorch's eager step; the compiled one is timed in a section by itself.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.job import Job, Report, read_json
from bench.gpu.sections import UnfinishedError, all_answered, asked
from bench.gpu.step_section import Case
from bench.gpu.torch_guest import missing
from bench.table import render
from mucudnn.errors import BackendError

_RESULT = "steps.json"
_PART = "steps-section.json"
FILES = (_RESULT,)

_BATCH = {"resnet50": 256, "resnet18": 256, "unet2d": 16, "alexnet_owt": 256}
_IMAGE = {"resnet50": 224, "resnet18": 224, "unet2d": 256, "alexnet_owt": 224}
_SMALL = {"resnet50": 32, "resnet18": 32, "unet2d": 16, "alexnet_owt": 224}
"""Height and width in rehearsals."""

_NETWORKS = ("resnet50", "unet2d", "resnet18", "alexnet_owt")
_KINDS = (("float32", "NCHW"), ("float16", "NHWC"))
_MORE = (("float32", "NHWC"), ("bfloat16", "NHWC"), ("float16", "NCHW"))

Section = tuple[str, str, str, bool]
"""Network, precision, layout, whether it is PyTorch's compiled step."""


def _sections() -> Iterator[Section]:
    yield from (("resnet50", *kind, False) for kind in _KINDS)
    yield from (("resnet50", *kind, True) for kind in _KINDS)
    yield from ((network, *kind, False) for network in _NETWORKS[1:] for kind in _KINDS)
    yield from (("resnet50", *kind, False) for kind in _MORE)


SECTIONS = tuple(_sections())
"""The most wanted first."""

_WORTH_S = 20.0
_MOST_S = 240.0
"""Seconds that one section may take."""

_POLL_S = 0.2
_SPARE_S = 4.0
"""What a section leaves of its time for writing down what it has."""


def run(job: Job) -> Report:
    """Every section that has no answer yet."""
    reason = missing(job.backend_name)
    if reason is not None:
        job.write(_RESULT, {"torch": reason, "sections": {}})
        return Report(True, (), reason)
    sections = SECTIONS[: job.layers]
    asks = {_name(one): partial(_answer, job, one) for one in sections}
    found = asked(job, _RESULT, asks, worth_s=1.0 if job.layers else _WORTH_S)
    failures = [
        f"{name}: {said}" for name, entry in found.items() for said in _wrong(entry)
    ]
    return Report(all_answered(found, asks), tuple(failures), _text(found))


def _case(job: Job, section: Section) -> Case:
    network, precision, layout, _ = section
    image = (_SMALL if job.layers else _IMAGE)[network]
    return Case(network, job.batch or _BATCH[network], image, precision, layout)


def _answer(job: Job, section: Section) -> Mapping[str, Any]:
    """Run a section in a process of its own; what it found, whatever ended it."""
    case, file = _case(job, section), job.out / _PART
    file.unlink(missing_ok=True)
    seconds = min(_MOST_S, job.left_s)
    process = subprocess.Popen(
        _command(job, case, file, seconds - _SPARE_S, compiled=section[-1]),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    ends = time.monotonic() + seconds
    try:
        while process.poll() is None and not _is_late(ends):
            time.sleep(_POLL_S)
            job.keep()
        status = process.poll()
    finally:
        with suppress(ProcessLookupError):  # it, and what measures for it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = read_json(file)
    file.unlink(missing_ok=True)
    if status is None and not found:
        raise UnfinishedError
    if status != 0:
        ended = f"it ended with {status}" if status else f"it took {seconds:.0f} s"
        if not found:
            raise BackendError(ended)
        found["errors"]["the process"] = ended
    return {"case": _described(case), **found}


def _is_late(ends: float) -> bool:
    return time.monotonic() >= ends


def _command(
    job: Job, case: Case, file: Path, seconds: float, *, compiled: bool
) -> list[str]:
    return [
        *(sys.executable, "-X", "faulthandler", "-m", "bench.gpu.step_section"),
        *(str(file), case.network, case.precision, case.layout),
        *("--backend", job.backend_name, "--batch", str(case.batch)),
        *("--image", str(case.image), "--seconds", str(seconds)),
        *(["--compiled"] if compiled else []),
    ]


def _described(case: Case) -> dict[str, Any]:
    return {"network": case.network, "batch": case.batch, "image": case.image}


def _wrong(entry: Mapping[str, Any]) -> list[str]:
    """What a section says that must not be."""
    if entry["state"] != "done":
        return [entry.get("error", "it has not ended")]
    found = [f"{name}: {error}" for name, error in entry["errors"].items()]
    for name, row in entry["rivals"].items():
        if row["losses"].get(name) is None:  # not finite
            found.append(f"the loss of {name} is no number")
    return found


def _name(section: Section) -> str:
    network, precision, layout, compiled = section
    return f"{network} {precision} {layout}{' compiled' if compiled else ''}"


def _text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("ms", "eager_ms", "ratio", "planning_s")
    rows = [
        (name, rival, *(row.get(column) for column in columns))
        for name, entry in sections.items()
        for rival, row in entry.get("rivals", {}).items()
    ]
    return render(("section", "rival", *columns), rows) if rows else "nothing yet"
