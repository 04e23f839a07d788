"""Planned PyTorch steps on this GPU: the same numbers as eager ones, peaks, and times.

A small GPT and ResNet-18 are trained by `mucudnn.torch.train_step` and under
`torch.compile` by `mucudnn.torch.backend`, without a limit and in half of the bytes
that a plan can save. Each is a section that is asked once and written by itself: losses
and parameters beside those of eager mode, what PyTorch's allocator had in use at most
beside what was planned, and times that take turns. Those without a limit come first.

PyTorch's algorithms are the deterministic ones wherever it has them, for both.
"""

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bench.gpu.job import Job, Report
from bench.gpu.pytorch_steps import (
    Step,
    Training,
    difference,
    least_bytes,
    medians,
    training,
)
from bench.gpu.sections import all_answered, asked
from bench.table import render

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
_STEPS, _ROUNDS = 3, 10
_PEAK = 1.05
"""Of the planned bytes: what the allocator may have in use, which rounds up."""


def run(job: Job) -> Report:
    """Every section that has no answer yet."""
    reason = missing(job.backend_name)
    if reason is not None:
        job.write(_RESULT, {"torch": reason, "sections": {}})
        return Report(True, (), reason)
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    sections = asked(
        job,
        _RESULT,
        {_name(*one): partial(_answer, job, *one) for one in SECTIONS},
        worth_s=_WORTH_S,
        head={"torch": torch.__version__, "deterministic": True},
        works=partial(_device_works, job),  # another process can go on with the others
    )
    failures = tuple(
        f"{name}: {said}" for name, entry in sections.items() for said in _wrong(entry)
    )
    complete = all_answered(sections, [_name(*one) for one in SECTIONS])
    return Report(complete, failures, f"torch {torch.__version__}\n{_text(sections)}")


def missing(backend_name: str) -> str | None:
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
    """Compare a planned step with eager mode's: numbers, bytes and times."""
    import torch

    device = _DEVICES[job.backend_name.partition(":")[0]]
    case = training(
        network,
        device,
        small=bool(job.layers),
        batch=job.batch,
        dropout=0.1,
        images=32,
        optimizer_of=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )
    ways: Mapping[str, Callable[[Training, int | None], Any]] = {
        "train_step": Training.planned,
        "backend": _Backend,
    }
    planned = ways[way]
    budget = None
    if limited:
        full = planned(case.copied(), None)
        full()
        least = least_bytes(lambda: planned(case.copied(), 1 << 10)())
        budget = (full.plan.peak_bytes + least) // 2
    cases = [case.copied() for _ in range(3)]
    eager, again = (one.eager() for one in cases[:2])
    ours = planned(cases[2], budget)
    wanted, twice, found = map(_states, cases, (eager, again, ours))
    return {
        "difference": difference(found, wanted),
        "eager_difference": difference(twice, wanted),
        "eager_repeats": difference(twice, wanted) == 0,
        "budget_bytes": budget,
        "planned_bytes": ours.plan.peak_bytes - ours.plan.resident_bytes,
        "peak_bytes": _peak(ours, device),
        "eager_bytes": _peak(eager, device),
        "resident_bytes": ours.plan.resident_bytes,
        **medians({"ms": ours, "eager_ms": eager}, device, _ROUNDS, job.deadline),
        "predicted_slowdown": ours.plan.slowdown,
    }


class _Backend:
    """A step under `torch.compile` with our backend; its update is eager."""

    def __init__(self, case: Training, budget: int | None) -> None:
        import torch

        import mucudnn.torch as mt

        def loss_of(x: Any, *targets: Any) -> Any:
            return case.loss(case.model(x), *targets)

        torch._dynamo.reset()
        self._backend = mt.backend(budget=budget, cache=None)
        compiled = torch.compile(loss_of, backend=self._backend, fullgraph=True)
        whole = replace(case, loss=lambda value, *targets: value)
        self._step = whole.eager(lambda model, x: compiled(*case.batch))

    @property
    def plan(self) -> Any:
        """The plan of the last step."""
        return self._backend.plans[-1]

    def __call__(self) -> Any:
        """Run one step; return its loss."""
        return self._step()


def _states(case: Training, step: Step) -> list[Any]:
    """Return losses of some steps, and what the model holds after them."""
    import torch

    torch.manual_seed(1)
    losses = [step().clone() for _ in range(_STEPS)]
    return [*losses, *(value.clone() for value in case.model.state_dict().values())]


def _peak(step: Step, device: str) -> int:
    """Return the allocator's bytes that a step takes beyond what is there."""
    import torch

    if device == "cpu":
        from bench.torch.peak import real_peak

        return real_peak(step)
    cuda = torch.cuda
    gc.collect()
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    before: int = cuda.memory_allocated()
    step()
    cuda.synchronize()
    most: int = cuda.max_memory_allocated()
    return most - before


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
