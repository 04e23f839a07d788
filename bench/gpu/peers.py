"""Ours beside plain cuDNN and PyTorch, layer by layer, in turn, in one process.

PyTorch's convolution is a rival with `cudnn.benchmark`, two limits and two formats. It
remembers the plan of a convolution per thread, whatever `benchmark_limit` was when it
searched. So each limit has a thread of its own, in which the search and all timed runs
happen.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench.gpu.choice import Bound, first_choice, in_turn, sampler
from bench.gpu.deepbench import record
from bench.gpu.job import RULE, Job, Report, read_json
from bench.gpu.verdicts import geomean
from bench.gpu.work import STAGES, deepbench_layers, key_of
from bench.table import render
from mucudnn.backends import Backend
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.numerics import RowStatus
from mucudnn.passes.microbatch import PLANNERS
from mucudnn.runtime.tuning.timing import Timing
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.suites import Layer

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


_LIMITS = (10, 0)
_FORMATS = {"NCHW": "contiguous_format", "NHWC": "channels_last"}
_DEVICES = {"cuda": "cuda", "cpu": "cpu"}


class Torch:
    """PyTorch on the same device.

    Args:
        backend_name: What the others are measured on.

    Raises:
        BackendUnavailableError: PyTorch is missing or cannot use that device.
    """

    def __init__(self, backend_name: str) -> None:
        kind = backend_name.partition(":")[0]
        if kind not in _DEVICES:
            raise BackendUnavailableError(f"PyTorch has no device like {backend_name}")
        try:
            import torch
        except ImportError as e:
            raise BackendUnavailableError(f"PyTorch is not installed: {e}") from e
        if kind == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"PyTorch {torch.__version__} sees no CUDA device"
            )
        self._torch = torch
        self._device = _DEVICES[kind]
        self._threads = {limit: ThreadPoolExecutor(1) for limit in _LIMITS}
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True

    @property
    def version(self) -> str:
        """PyTorch's, and that of the cuDNN it uses."""
        cudnn = self._torch.backends.cudnn.version()
        return f"{self._torch.__version__}, cuDNN {cudnn}"

    def rivals(
        self, backend: Backend, problem: ConvProblem
    ) -> Iterator[tuple[str, Callable[[], float], int | None]]:
        """Name, sampler and bytes of workspace; plans are found before each is given.

        Raises:
            RuntimeError: PyTorch cannot run it.
        """
        for layout in _FORMATS:
            op = self._operation(problem, layout)
            for limit, thread in self._threads.items():
                self._torch.backends.cudnn.benchmark_limit = limit
                nbytes = thread.submit(self._searched, op).result()
                sample = sampler(backend, op)
                yield (
                    f"torch_limit{limit}_{layout}",
                    lambda thread=thread, sample=sample: thread.submit(sample).result(),  # type: ignore[misc]
                    nbytes,
                )

    def release(self) -> None:
        """Give cached memory back."""
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()

    def _searched(self, op: Callable[[], Any]) -> int | None:
        """Run twice; the second has its plan, and only its own workspace."""
        op()
        if self._device != "cuda":
            return None
        cuda = self._torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before: int = cuda.memory_allocated()
        out = op()
        cuda.synchronize()
        outputs = out if isinstance(out, tuple) else (out,)
        made = sum(t.numel() * t.element_size() for t in outputs if t is not None)
        peak: int = cuda.max_memory_allocated()
        return max(0, peak - before - int(made))

    def _operation(self, problem: ConvProblem, layout: str) -> Callable[[], Any]:
        torch = self._torch
        where = {
            "device": self._device,
            "dtype": getattr(torch, problem.dtype),
        }
        memory_format = getattr(torch, _FORMATS[layout])
        x, w, dy = (
            (torch.rand(shape, **where) - 0.5).to(memory_format=memory_format)
            for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
        )
        stride, padding = list(problem.stride), list(problem.padding)
        dilation = list(problem.dilation)
        if problem.direction is Direction.FORWARD:

            def forward() -> Any:
                with torch.no_grad():
                    return torch.conv2d(
                        x, w, None, stride, padding, dilation, problem.groups
                    )

            return forward
        wanted = [
            problem.direction is Direction.BACKWARD_DATA,
            problem.direction is Direction.BACKWARD_FILTER,
            False,
        ]

        def backward() -> Any:
            return torch.ops.aten.convolution_backward(
                *(dy, x, w, None, stride, padding, dilation),
                *(False, [0, 0], problem.groups, wanted),
            )

        return backward


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
