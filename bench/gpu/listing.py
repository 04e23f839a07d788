"""The engines listed on the device beside those listed from its description.

`python -m bench.gpu.listing BACKEND BATCH` prints one list as JSON: the description is
read in a process of its own, since one process can be in one of the two states only.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.choice import from_graph_api
from bench.gpu.job import Job
from mucudnn.backends import Backend, get_backend
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvProblem, Direction

_BATCH = 256
_SHAPES = (
    ((64, 27, 27), (192, 64, 5, 5), 2),
    ((64, 56, 56), (64, 64, 3, 3), 1),
)
_KINDS = (
    (Direction.FORWARD, "float32", "NCHW"),
    (Direction.BACKWARD_FILTER, "float16", "NCHW"),
    (Direction.BACKWARD_DATA, "float32", "NHWC"),
)

Rows = list[tuple[str, int]]


def compared_listings(job: Job, description: Path) -> Mapping[str, Any]:
    """How the two lists differ, layer by layer.

    Raises:
        BackendError: The other process failed.
    """
    batch = job.batch or _BATCH
    other = f"cuda:{description}" if description.exists() else job.backend_name
    arguments = [sys.executable, "-m", "bench.gpu.listing", other, str(batch)]
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=max(1.0, job.left_s),
        check=False,
    )
    if done.returncode:
        raise BackendError(f"listing from {other}: {done.stderr[-2000:]}")
    elsewhere: dict[str, Rows] = json.loads(done.stdout.splitlines()[-1])
    here = _listing(job.backend, batch)
    layers = {name: _difference(rows, elsewhere[name]) for name, rows in here.items()}
    equal = sum(bool(found["equal"]) for found in layers.values())
    return {
        "other": other,
        "layers": layers,
        "text": f"{equal} of {len(layers)} lists are equal",
    }


def _listing(backend: Backend, batch: int) -> dict[str, Rows]:
    return {str(p): from_graph_api(backend, p) for p in _problems(batch)}


def _problems(batch: int) -> Iterator[ConvProblem]:
    for image, filters, padding in _SHAPES:
        for direction, dtype, layout in _KINDS:
            yield ConvProblem(
                direction=direction,
                x_shape=(batch, *image),
                w_shape=filters,
                padding=padding,
                dtype=dtype,
                layout=layout,
            )


def _difference(here: Rows, there: Rows) -> dict[str, Any]:
    ours, theirs = dict(here), dict(there)
    return {
        "here": len(ours),
        "there": len(theirs),
        "equal": ours == theirs,
        "same_order": list(ours) == list(theirs),
        "only_here": sorted(ours.keys() - theirs.keys()),
        "only_there": sorted(theirs.keys() - ours.keys()),
        "other_workspace": {
            name: (ours[name], theirs[name])
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        },
    }


def _main() -> None:
    name, batch = sys.argv[1:]
    print(json.dumps(_listing(get_backend(name), int(batch))))


if __name__ == "__main__":
    _main()
