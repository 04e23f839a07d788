"""Questions about kernels: what adding costs, what cuDNN offers, how halves add up.

Adding to the output against replacing it; cuDNN's first API; cuDNN's own pooling,
norms and softmax against our kernels, on networks' shapes; and what a half-precision
filter gradient loses when many parts are added up.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.gpu.choice import (
    Bound,
    first_choice,
    from_graph_api,
    in_turn,
    plan_of,
    sampler,
)
from bench.gpu.job import RULE, Job
from bench.gpu.verdicts import geomean
from bench.table import render
from mucudnn.codecs import perf_to_dict
from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction
from mucudnn.ir.numerics import Numerics
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.runtime.profiling.profiler import signature
from mucudnn.runtime.training.measured_choices import KernelRaces
from mucudnn.runtime.tuning.bound_plan import run_plan
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import (
    MeasureLimits,
    SizeRequest,
    measure_size,
)
from mucudnn.runtime.tuning.tuner import Tuner

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


_NETWORK_BATCH = 64
_NETWORKS = ("alexnet", "resnet50", "googlenet")


def library_kernels(job: Job) -> Mapping[str, Any]:
    """Milliseconds of both for each distinct node that has two, as a step has them."""
    library = job.backend.library_kernels
    if library is None:
        return {"skipped": "no library computes what our kernels do"}
    race = KernelRaces(Tuner(backend=job.backend, cache=None))
    rows: list[dict[str, Any]] = []
    seen = set()
    for name in _NETWORKS:
        graph = training_graph(
            fuse_elementwise(get_model(name)(job.batch or _NETWORK_BATCH))
        )
        for node in graph.nodes:
            key = signature(graph, node)
            if key in seen or not library.offers(graph, node) or job.left_s < 1:
                continue
            seen.add(key)
            times = race.library_times(graph, node, library)
            if times is not None:
                row = {"network": name, "node": node.name, "op": node.op}
                refused = not library.offers(graph, node)
                rows.append({**row, "times_ms": times, "refused": refused})
    ratios = [r["times_ms"][1] / r["times_ms"][0] for r in rows if not r["refused"]]
    mean = geomean(ratios)
    said = "nothing ran" if mean is None else f"{library.name} / ours: mean {mean:.3f}"
    return {"rows": rows, "text": said}


_SUM_BATCH = 64
_PARTS = (1, 8, 64)
_SUMS = {"half": ("", Numerics()), "float32": ("+f32", Numerics(float32_sums=True))}


def half_sums(job: Job) -> Mapping[str, Any]:
    """Relative errors, against one undivided call and against float32."""
    if job.backend_name.partition(":")[0] not in ("cuda", "cpu"):
        return {"skipped": f"backend {job.backend_name} computes nothing"}
    rows = [row for dtype in ("float16", "bfloat16") for row in _sums_of(job, dtype)]
    if not rows:
        return {"skipped": "no half-precision algorithm runs here"}
    header = ("dtype", "sums", "parts", "to undivided", "to float32")
    cells = [
        (
            *(row["dtype"], row["sums"], row["parts"]),
            *(f"{row[name]:.2e}" for name in ("to_undivided", "to_float32")),
        )
        for row in rows
    ]
    return {"rows": rows, "text": "\n" + render(header, cells)}


def _sums_of(job: Job, dtype: str) -> list[dict[str, Any]]:
    batch = min(job.batch or _SUM_BATCH, _SUM_BATCH)
    problem = ConvProblem(
        direction=Direction.BACKWARD_FILTER,
        x_shape=(batch, 64, 27, 27),
        w_shape=(192, 64, 5, 5),
        padding=2,
        dtype=dtype,
    )
    if not job.backend.conv.algorithms(problem):
        return []
    whole = Bound(job.backend, problem)
    undivided = _gradient(job, whole, 1, "half")
    exact = _float32(job, whole)
    rows = []
    for sums in _SUMS:
        for parts in _PARTS:
            if parts > batch or (parts == 1 and sums != "half"):
                continue
            found = _gradient(job, whole, parts, sums)
            rows.append(
                {
                    "dtype": dtype,
                    "sums": sums,
                    "parts": parts,
                    "to_undivided": _error(found, undivided),
                    "to_float32": _error(found, exact),
                }
            )
    return rows


def _gradient(job: Job, whole: Bound, parts: int, sums: str) -> Any:
    """The gradient of `parts` equal micro-batches, as float64 on the host."""
    backend, problem = job.backend, whole.problem
    suffix, numerics = _SUMS[sums]
    micro = Bound(backend, problem.with_batch(problem.batch // parts))
    choice = first_choice(micro, numerics=numerics, suffix=suffix)
    if choice is None:
        raise UnsupportedError(f"nothing runs {micro.problem} with {sums} sums")
    plan = plan_of(problem, *choice, parts)
    scratch = backend.device.allocate(choice[1])
    run_plan(backend, plan, whole.a, whole.b, whole.out, scratch)
    return _on_host(whole.out, problem.dtype)


def _float32(job: Job, whole: Bound) -> Any:
    """The same gradient computed in float32 from the same half-precision inputs."""
    exact = Bound(job.backend, replace(whole.problem, dtype="float32"))
    for target, source in ((exact.a, whole.a), (exact.b, whole.b)):
        _widen(target, source, whole.problem.dtype)
    choice = first_choice(exact, numerics=Numerics(tf32=False))
    if choice is None:
        raise UnsupportedError(f"nothing runs {exact.problem} in float32")
    exact.run(choice[0], job.backend.device.allocate(choice[1]))
    return _on_host(exact.out, "float32")


def _widen(target: Any, source: Any, dtype: str) -> None:
    """Copy half precision to float32; bfloat16 is the upper half of its bits."""
    if dtype == "bfloat16":
        target.view("uint32")[...] = source.view("uint16").astype("uint32") << 16
    else:
        target[...] = source


def _on_host(array: Any, dtype: str) -> Any:
    import numpy as np

    values = array if isinstance(array, np.ndarray) else array.get()
    if dtype == "bfloat16":
        values = (values.view("uint16").astype("uint32") << 16).view("float32")
    return np.array(values, "float64")


def _error(found: Any, exact: Any) -> float:
    import numpy as np

    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
