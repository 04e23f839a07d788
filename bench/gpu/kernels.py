"""Single kernels: adding to the output against replacing it, and cuDNN's first API."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from bench.gpu.choice import Bound, from_graph_api
from bench.gpu.job import RULE, Job
from bench.gpu.turns import in_turn, sampler
from bench.gpu.verdicts import geomean
from mucudnn.codecs import perf_to_dict
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import (
    MeasureLimits,
    SizeRequest,
    measure_size,
)

__all__ = ["accumulating", "first_api"]

_BATCH = 256
_FAVOURITES = 8
_CONV2 = ((64, 27, 27), (192, 64, 5, 5), 2)
_RES2 = ((64, 56, 56), (64, 64, 3, 3), 1)
_FIRST_API_S = 12.0


def accumulating(job: Job) -> Mapping[str, Any]:
    """Time of beta = 1 over that of beta = 0, for the library's favourite engines."""
    rows = []
    for problem in (
        _problem(job, _CONV2, Direction.BACKWARD_FILTER, "float32"),
        _problem(job, _RES2, Direction.BACKWARD_FILTER, "float16"),
        _problem(job, _RES2, Direction.FORWARD, "float32"),
    ):
        names = [a for a in from_graph_api(job.backend, problem) if "+" not in a[0]]
        if not names:
            continue
        bound = Bound(job.backend, problem)
        for algo, nbytes in names[:_FAVOURITES]:
            rows.append(_adding(job, bound, algo, nbytes))
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    mean, worst = geomean(ratios), max(ratios, default=None)
    said = "nothing ran" if mean is None else f"mean {mean:.3f}, worst {worst:.3f}"
    return {"rows": rows, "text": f"beta=1 / beta=0: {said}"}


def _adding(job: Job, bound: Bound, algo: str, nbytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"problem": str(bound.problem), "algo": algo}
    try:
        scratch = job.backend.device.allocate(nbytes)
        samplers = {
            name: sampler(
                job.backend,
                lambda add=add: bound.run(algo, scratch, accumulate=add),  # type: ignore[misc]
            )
            for name, add in (("replace", False), ("add", True))
        }
        found = in_turn(samplers, RULE, job.deadline)
    except MucudnnError as e:
        return {**row, "error": str(e)}
    replace_ms, add_ms = found["replace"].time_ms, found["add"].time_ms
    ratio = add_ms / replace_ms if replace_ms else None
    return {**row, "replace_ms": replace_ms, "add_ms": add_ms, "ratio": ratio}


def first_api(job: Job) -> Mapping[str, Any]:
    """Which algorithms of the first API there are, their time and workspace."""
    isolation = Isolation()
    ends = min(job.deadline, time.monotonic() + _FIRST_API_S)
    layers, ran = [], set[str]()
    try:
        for problem in _first_api_problems(job):
            rows: list[AlgoPerf] = []
            graph = {name for name, _ in from_graph_api(job.backend, problem)}
            virtual = not job.backend_name.startswith("cuda")
            names = {
                name: nbytes
                for name, nbytes in job.backend.conv.algorithms(problem)
                if (virtual or name not in graph) and "+" not in name
            }
            request = SizeRequest(
                problem=problem,
                batch=problem.batch,
                workspaces=names,
                limits=MeasureLimits(rule=RULE, deadline=ends),
            )
            timer = isolation.timer(job.backend)
            measure_size(timer, request, rows.append)
            timer.release()
            ran |= {row.algo for row in rows if row.error is None}
            excluded = dict(job.backend.conv.excluded(problem))
            layers.append(
                {
                    "problem": str(problem),
                    "rows": [perf_to_dict(row) for row in rows],
                    "excluded": excluded,
                }
            )
    finally:
        isolation.close()
    return {"layers": layers, "text": f"ran: {', '.join(sorted(ran))}"}


def _first_api_problems(job: Job) -> Iterator[ConvProblem]:
    for dtype in ("float32", "float16"):
        for shape in (_CONV2, _RES2):
            for direction in Direction:
                yield _problem(job, shape, direction, dtype)


def _problem(
    job: Job,
    shape: tuple[tuple[int, ...], tuple[int, ...], int],
    direction: Direction,
    dtype: str,
) -> ConvProblem:
    image, filters, padding = shape
    return ConvProblem(
        direction=direction,
        x_shape=(job.batch or _BATCH, *image),
        w_shape=filters,
        padding=padding,
        dtype=dtype,
    )
