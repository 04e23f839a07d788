"""Ours beside plain cuDNN and PyTorch, layer by layer, in turn, in one process."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.gpu.choice import Bound, first_choice
from bench.gpu.deepbench import record
from bench.gpu.job import RULE, Job, Report
from bench.gpu.store import read_json
from bench.gpu.torch_peer import Torch
from bench.gpu.turns import in_turn, sampler
from bench.gpu.verdicts import geomean
from bench.gpu.work import STAGES, deepbench_layers, key_of
from bench.table import render
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.numerics import RowStatus
from mucudnn.passes.microbatch import PLANNERS
from mucudnn.runtime.tuning.timing import Timing
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.suites import Layer

__all__ = ["FILES", "run"]

_RESULT = "peers.json"
FILES = (_RESULT,)

_LIMIT = 64 << 20
_STAGE = STAGES[0]
_OURS = "ours_divided"
_WORTH_S = 2.0
_ENDLESS = 1 << 62

Rival = tuple[Callable[[], float], int | None]
"""How to take a sample, and the bytes of workspace."""


def run(job: Job) -> Report:
    """One row a layer and direction that is not there yet."""
    torch, reason = _torch(job)
    rows: dict[str, Any] = {
        row["key"]: row for row in read_json(job.out / _RESULT).get("rows", [])
    }
    layers = _measured_first(job, deepbench_layers(job))
    failures = []
    with job.open_cache() as cache:
        tuner = Tuner(
            backend=job.backend, cache=cache, batch_policy="powers_of_two", rule=RULE
        )
        try:
            for layer in layers:
                key = key_of(layer.name, layer.problem)
                if key in rows:
                    continue
                if job.left_s < _WORTH_S:
                    break
                try:
                    row = _one(job, tuner, _STAGE.of(layer.problem), torch)
                except MucudnnError as e:
                    failures.append(f"{key}: {e}")
                    continue
                if row is None:  # there was no time to measure it
                    break
                rows[key] = {"key": key, "layer": layer.name, **row}
                head = {"limit": _LIMIT, "stage": _STAGE.name, "torch": reason}
                job.write(_RESULT, {**head, "rows": list(rows.values())})
                job.keep(lambda: record(job, cache))
        finally:
            tuner.close()
            job.keep(lambda: record(job, cache), now=True)
            if torch is not None:
                torch.close()
    missing = len(layers) - len(rows)
    text = f"torch: {reason}\n{_text(rows.values())}"
    return Report(missing == 0, tuple(failures), text)


def _torch(job: Job) -> tuple[Torch | None, str]:
    """PyTorch and its version, or why it is left out.

    It comes before the backend, which then uses the cuDNN that PyTorch has loaded.
    """
    try:
        torch = Torch(job.backend_name)
    except BackendUnavailableError as e:
        return None, f"left out: {e}"
    return torch, torch.version


def _measured_first(job: Job, layers: Sequence[Layer]) -> list[Layer]:
    known = read_json(job.out / _STAGE.file).get("layers", [])
    done = {row["key"] for row in known if row["complete"]}
    return sorted(layers, key=lambda one: key_of(one.name, one.problem) not in done)


def _one(
    job: Job, tuner: Tuner, problem: ConvProblem, torch: Torch | None
) -> dict[str, Any] | None:
    """All rivals on one problem; None where its table could not be completed."""
    begun = time.monotonic()
    table = tuner.measure(problem, time_limit_s=job.left_s)
    short = any(perf.status is RowStatus.LIMITED for perf in table.perfs)
    if short or job.left_s < _WORTH_S / 2:
        return None
    errors: dict[str, str] = {}
    rivals = _ours(job, table, errors)
    rivals |= _plain(job, problem, errors)
    if torch is not None:
        try:
            for name, sample, nbytes in torch.rivals(job.backend, problem):
                rivals[name] = sample, nbytes
        except RuntimeError as e:
            errors["torch"] = str(e)
    timings = _timed(job, rivals, errors)
    rivals.clear()
    _release(job, torch)
    return {
        "seconds": time.monotonic() - begun,
        "rivals": {
            name: {
                "time_ms": timing.time_ms,
                "noise_ms": timing.noise_ms,
                "samples": timing.samples,
                "workspace": nbytes,
            }
            for name, (timing, nbytes) in timings.items()
        },
        "errors": errors,
    }


def _ours(job: Job, table: PerfTable, errors: dict[str, str]) -> dict[str, Rival]:
    """Our plan within the limit; the fastest single calls within it and without."""
    backend, problem = job.backend, table.problem
    plans: dict[str, ConvPlan] = {}
    for name, planner, limit in (
        (_OURS, "workspace_reuse", _LIMIT),
        ("fastest_undivided", "undivided", _LIMIT),
        ("fastest_unlimited", "undivided", _ENDLESS),
    ):
        try:
            (plans[name],) = PLANNERS.resolve(planner)([table], limit)
        except MucudnnError as e:
            errors[name] = str(e)
    bound = Bound(backend, problem)
    found = {}
    for name, plan in plans.items():
        scratch = backend.device.allocate(plan.workspace)
        compiled = backend.bind(plan)
        run = functools.partial(
            compiled.run, bound.a, bound.b, bound.out, scratch, False
        )
        found[name] = sampler(backend, run), plan.workspace
    return dict(found)


def _plain(job: Job, problem: ConvProblem, errors: dict[str, str]) -> dict[str, Rival]:
    """What cuDNN's heuristics name first, within the limit, without, channels last."""
    last = replace(problem, layout="NHWC")
    found: dict[str, Rival] = {}
    for name, one, limit in (
        ("cudnn_limited", problem, float(_LIMIT)),
        ("cudnn_unlimited", problem, float("inf")),
        ("cudnn_unlimited_NHWC", last, float("inf")),
    ):
        try:
            bound = Bound(job.backend, one)
            choice = first_choice(bound, limit)
        except MucudnnError as e:
            errors[name] = str(e)
            continue
        if choice is None:
            errors[name] = "no algorithm runs within the limit"
            continue
        algo, nbytes = choice
        scratch = job.backend.device.allocate(nbytes)
        run = functools.partial(bound.run, algo, scratch)
        found[name] = sampler(job.backend, run), nbytes
    return found


def _timed(
    job: Job, rivals: Mapping[str, Rival], errors: dict[str, str]
) -> dict[str, tuple[Timing, int | None]]:
    """In turn; a rival that fails is left out."""
    able: dict[str, Callable[[], float]] = {}
    for name, (sample, _) in rivals.items():
        try:
            sample()
        except (MucudnnError, RuntimeError) as e:
            errors[name] = str(e)
        else:
            able[name] = sample
    timings = in_turn(able, RULE, job.deadline)
    return {name: (timing, rivals[name][1]) for name, timing in timings.items()}


def _release(job: Job, torch: Torch | None) -> None:
    if torch is not None:
        torch.release()
    if job.backend_name == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def _text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Geometric means of each rival's time over ours."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ours = row["rivals"].get(_OURS)
        if not ours or not ours["time_ms"]:
            continue
        for name, rival in row["rivals"].items():
            if rival["time_ms"]:
                ratio = rival["time_ms"] / ours["time_ms"]
                ratios.setdefault(name, []).append(ratio)
    cells = [
        (name, len(found), geomean(found), min(found), max(found))
        for name, found in ratios.items()
    ]
    header = ("rival", "layers", "its time / ours", "least", "most")
    return render(header, cells) if cells else "nothing yet"
