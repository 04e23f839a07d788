"""What a half-precision filter gradient loses when many parts are added up."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.gpu.choice import Bound, first_choice, plan_of
from bench.gpu.job import Job
from bench.table import render
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import Numerics
from mucudnn.runtime.tuning.bound_plan import run_plan

__all__ = ["half_sums"]

_BATCH = 64
_PARTS = (1, 8, 64)
_SUMS = {"half": ("", Numerics()), "float32": ("+f32", Numerics(float32_sums=True))}


def half_sums(job: Job) -> Mapping[str, Any]:
    """Relative errors, against one undivided call and against float32."""
    if job.backend_name.partition(":")[0] not in ("cuda", "cpu"):
        return {"skipped": f"backend {job.backend_name} computes nothing"}
    rows = [row for dtype in ("float16", "bfloat16") for row in _of(job, dtype)]
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


def _of(job: Job, dtype: str) -> list[dict[str, Any]]:
    batch = min(job.batch or _BATCH, _BATCH)
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
