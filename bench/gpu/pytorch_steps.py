"""The sections of `bench.gpu.pytorch`, and the trainings that all parts compare.

A section is a function of a network and a device. It returns its figures and, under
`wrong`, a line for everything that must not be.
"""

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.job import read_json, write_json
from mucudnn.errors import MucudnnError, PlanningError

_SHARES = (0.9, 0.6, 0.3)
"""Budgets, between the least and what a step needs without one."""

_STEPS = 20
_ROUNDS = 8
_RESERVED = 1.02
"""Of what a plan says is reserved: what the allocator may reserve."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class Training:
    """A model in training mode, its loss and a batch, on a device.

    Steps train the model itself; `copied` gives another that begins alike.
    """

    model: Any
    loss: Callable[..., Any]
    batch: tuple[Any, ...]
    optimizer_of: Callable[[Any], Any]

    def copied(self) -> "Training":
        """Return the same training with a model of its own."""
        return replace(self, model=copy.deepcopy(self.model))

    def eager(
        self,
        forward: Callable[[Any, Any], Any] | None = None,
        optimizer_of: Callable[[Any], Any] | None = None,
    ) -> Step:
        """Return eager mode's step.

        Args:
            forward: Of the model and its input; by default the model is called.
            optimizer_of: Makes another optimizer of the model.
        """
        optimizer = (optimizer_of or self.optimizer_of)(self.model)
        x, *targets = self.batch

        def step() -> Any:
            y = self.model(x) if forward is None else forward(self.model, x)
            value = self.loss(y, *targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return step

    def planned(self, budget: int | None = None) -> "TrainStep":
        """Return a step that is planned already."""
        step = self.train_step(budget=budget)
        step.prepare(*self.batch)
        return TrainStep(step, self.batch)

    def train_step(self, **settings: Any) -> Any:
        """Return a `train_step` that is not planned yet."""
        import mucudnn.torch as mt

        optimizer = self.optimizer_of(self.model)
        return mt.train_step(self.model, self.loss, optimizer, cache=None, **settings)

    def budgets(self) -> dict[str, int]:
        """Return budgets between a step's least and what it needs without one.

        Finding them takes two plans. The file `$BUDGETS` keeps them for other sections.
        """
        sizes = [tuple(t.shape) for t in (*self.model.parameters(), *self.batch)]
        key, file = str(sizes), os.environ.get("BUDGETS")
        known = read_json(Path(file)) if file else {}
        if key not in known:
            mine = self.copied()
            most = mine.planned().plan.peak_bytes
            known[key] = [least_bytes(lambda: mine.planned(1 << 10)), most]
            if file:
                write_json(Path(file), known)
        least, most = known[key]
        return {f"{share:.0%}": max(least, int(share * most)) for share in _SHARES}


@dataclass(frozen=True)
class TrainStep:
    """A planned step of one batch."""

    step: Any
    batch: tuple[Any, ...]

    @property
    def plan(self) -> Any:
        """The plan of the last step."""
        return self.step.plan

    def __call__(self) -> Any:
        """Run one step; return its loss."""
        return self.step(*self.batch)


def training(
    network: str,
    device: str,
    *,
    small: bool,
    batch: int | None = None,
    dropout: float = 0.0,
    images: int = 64,
    optimizer_of: Callable[[Any], Any] | None = None,
) -> Training:
    """Return the training of a network: `gpt`, `gpt2`, or images of `NETWORKS`.

    Args:
        network: Its name.
        device: Where it is.
        small: Whether it is only rehearsed.
        batch: Samples in a batch instead of the network's own.
        dropout: Of a decoder.
        images: In a batch of any other network than ResNet-50.
        optimizer_of: Makes the optimizer of a model; AdamW by default.
    """
    import torch

    from bench.torch.networks import NETWORKS
    from bench.torch.zoo import GPTConfig, gpt

    torch.manual_seed(0)
    optimizer_of = optimizer_of or partial(torch.optim.AdamW, lr=1e-4)
    if network.startswith("gpt"):
        layers, width, heads, length, words = (12, 768, 12, 1024, 50257)
        if small:
            layers, width, heads, length, words = (1, 32, 2, 16, 64)
        elif network == "gpt":
            layers, width, heads, length, words = (4, 256, 4, 256, 4096)
        config = GPTConfig(layers, width, heads, length, words, dropout)
        count = batch or (2 if small else 16 if network == "gpt" else 8)
        found = gpt(count, config)
        tensors = tuple(tensor.to(device) for tensor in found.batch)
        model = found.model.to(device)
        return Training(model, found.loss_fn, tensors, _trained(optimizer_of))
    count = batch or (2 if small else 256 if network == "resnet50" else images)
    pixels = 32 if small else 224
    x = torch.randn(count, 3, pixels, pixels, device=device)
    y = torch.randint(1000, (count,), device=device)
    model = NETWORKS["resnet18" if small else network]().train().to(device)
    loss = torch.nn.functional.cross_entropy
    return Training(model, loss, (x, y), _trained(optimizer_of))


def _trained(optimizer_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: optimizer_of(model.parameters())


def least_bytes(plan: Callable[[], object]) -> int:
    """Return the least budget that the refusal of a tiny one names."""
    try:
        plan()
    except PlanningError as e:
        if e.least_bytes is None:
            raise
        return e.least_bytes
    raise MucudnnError("a step was planned in 1 KiB")


def medians(
    steps: Mapping[str, Step],
    device: str,
    rounds: int,
    deadline: float = float("inf"),
) -> dict[str, float]:
    """Return medians in ms of steps that take turns.

    Args:
        steps: Each is warmed up once.
        device: `cuda` is waited for.
        rounds: How often each is timed at most.
        deadline: `time.monotonic()` that ends them, after one round at the earliest.
    """
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            wait()
            begun = time.perf_counter()
            step()
            wait()
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - begun))
        if turn and time.monotonic() >= deadline:
            break
    return {name: statistics.median(ms) for name, ms in taken.items()}


def difference(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Return the largest difference relative to a tensor's largest number.

    It is infinite where a number is not finite.
    """
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        off = float((ours.double() - theirs.double()).abs().max())
        if off != off:
            return float("inf")
        worst = max(worst, off / max(1e-30, float(theirs.double().abs().max())))
    return worst


# -- sections


def faces(device: str, *, small: bool) -> dict[str, Any]:
    """Run one step by every face, in the settings that users have."""
    import torch

    import mucudnn.torch as mt

    def small_gpt() -> Training:
        torch._dynamo.reset()  # the networks share code, but no sizes
        return training("gpt", device, small=True)

    def trained(**settings: Any) -> None:
        case = small_gpt()
        case.train_step(**settings)(*case.batch)

    def scaled() -> None:
        scaler = torch.amp.GradScaler(device)
        with torch.autocast(device, dtype=torch.float16):
            trained(scaler=scaler)

    def compiled() -> None:
        torch._dynamo.reset()
        case = training("resnet18", device, small=True)
        run = torch.compile(case.model, backend=mt.backend(cache=None))
        case.loss(run(case.batch[0]), case.batch[1]).backward()

    def studied() -> None:
        case = small_gpt()
        optimizer = case.optimizer_of(case.model)
        mt.memory(case.model, case.loss, case.batch, optimizer).plan()

    found: dict[str, Any] = {}
    named = {
        "train_step": trained,
        "train_step, autocast and scaler": scaled,
        "backend": compiled,
        "memory": studied,
    }
    for name, run in named.items():
        try:
            run()
        except Exception as e:  # one must not cost the others
            found[name] = f"{type(e).__name__}: {e}"
    return {"faces": [*named], "wrong": [f"{k}: {v}" for k, v in found.items()]}


def numbers(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare parameters and buffers after many steps with eager mode's."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    case = training(network, device, small=small)

    def state_of(made: Callable[[Training], Step]) -> list[Any]:
        mine = case.copied()
        torch.manual_seed(1)
        step = made(mine)
        for _ in range(3 if small else _STEPS):
            step()
        return [value.double() for value in mine.model.state_dict().values()]

    wanted, again = state_of(Training.eager), state_of(Training.eager)
    noise = difference(again, wanted)
    found: dict[str, Any] = {"eager_difference": noise, "difference": {}, "wrong": []}
    for share, budget in case.budgets().items():
        off = difference(state_of(partial(Training.planned, budget=budget)), wanted)
        found["difference"][share] = off
        if off > 10 * noise:
            found["wrong"].append(f"at {share} of the memory it differs by {off:.2g}")
    return found


def sanitized(device: str, *, small: bool) -> dict[str, Any]:
    """Run steps that offload under PyTorch's sanitizer, which raises at a race."""
    case = training("gpt", device, small=small)
    budget = min(case.budgets().values())
    step = case.planned(budget)
    with sanitizer() if device == "cuda" else nullcontext():
        for _ in range(3):
            step()
    return {"budget_bytes": budget}


def is_traced(given: Sequence[Any]) -> bool:
    """Return whether an operation on these values is recorded, not run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    wrapped = FakeTensor, FunctionalTensor
    return mode is not None or any(isinstance(value, wrapped) for value in given)


@contextmanager
def sanitizer() -> Iterator[type[Exception]]:
    """Check every operation that runs within; yield the error that a race raises.

    PyTorch's sanitizer asks every tensor for its address, which those of a step that is
    captured lack, and takes a tensor that is given a storage for one that is written.
    """
    import torch
    import torch.cuda._sanitizer as csan

    mode: Any = csan.CUDASanitizerDispatchMode
    checked = mode.__torch_dispatch__

    def dispatch(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        if "set_" in str(func) or is_traced(given):
            return func(*args, **(kwargs or {}))
        return checked(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch
    csan.cuda_sanitizer.enable()
    try:
        yield csan.CUDASanitizerErrors
    finally:
        csan.cuda_sanitizer.disable()
        mode.__torch_dispatch__ = checked


def memory(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare what is requested, allocated and reserved with the plan."""
    import torch

    case = training(network, device, small=small)
    rows, wrong = {}, []
    for share, budget in case.budgets().items():
        gc.collect()  # the copies that were planned before
        retries = 0
        if device == "cuda":
            torch.cuda.empty_cache()
            retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        step = case.planned(budget)
        for _ in range(3):
            step()
        plan = step.plan
        row = {
            "budget_bytes": budget,
            "planned_bytes": plan.peak_bytes + plan.given_bytes,
            "planned_reserved_bytes": plan.reserved_bytes + plan.given_bytes,
        }
        if device == "cuda":
            stats = torch.cuda.memory_stats()
            for kind in ("requested", "allocated", "reserved"):
                row[f"{kind}_bytes"] = stats[f"{kind}_bytes.all.peak"]
            row["retries"] = stats["num_alloc_retries"] - retries
            # Segments of the allocator's are larger than a rehearsal's whole step.
            if not small and row["requested_bytes"] > row["planned_bytes"]:
                wrong.append(f"at {share}: more is requested than planned")
            reserved = _RESERVED * row["planned_reserved_bytes"]
            if not small and row["reserved_bytes"] > reserved:
                wrong.append(f"at {share}: more is reserved than planned")
        rows[share] = row
        del step, plan
        gc.collect()
    return {"budgets": rows, "wrong": wrong}


def batch_limits(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Find the largest batch in a part of the device's memory, planned and eager."""
    import torch

    whole = torch.cuda.mem_get_info()[1] if device == "cuda" else 1 << 30
    limit = whole // 8
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / whole)

    def fits(made: Callable[[Training], Step], batch: int) -> bool:
        try:
            step = made(training(network, device, small=small, batch=batch))
            step(), step()
        except (torch.OutOfMemoryError, PlanningError):
            return False
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        return True

    def largest(made: Callable[[Training], Step]) -> int:
        low, size = 0, 1
        while size <= (2 if small else 4096) and fits(made, size):
            low, size = size, 2 * size
        return low

    ours = partial(Training.planned, budget=int(0.9 * limit))
    eager = largest(Training.eager)
    return {"limit_bytes": limit, "eager": eager, "planned": largest(ours)}


def times(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare times at several budgets with what PyTorch offers, in turns."""
    import torch
    from torch.utils.checkpoint import checkpoint

    case = training(network, device, small=small)

    def adamw(**options: Any) -> Callable[[Any], Any]:
        return lambda model: torch.optim.AdamW(model.parameters(), 1e-4, **options)

    def on_host(model: Any, x: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
            return model(x)

    again = partial(checkpoint, use_reentrant=False)
    steps: dict[str, Step] = {
        "eager, foreach": case.copied().eager(None, adamw(foreach=True)),
        "eager, fused": case.copied().eager(None, adamw(fused=True)),
        "checkpoint": case.copied().eager(again),
        "save_on_cpu": case.copied().eager(on_host),
    }
    if not small:
        mine = case.copied()
        compiled = replace(mine, model=torch.compile(mine.model))
        steps["torch.compile"] = compiled.eager()
    for share, budget in {"no budget": None, **case.budgets()}.items():
        steps[f"planned, {share}"] = case.copied().planned(budget)
    return {"ms": medians(steps, device, 2 if small else _ROUNDS)}


def trace(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Trace a step that offloads: kernels, copies, what overlaps, and host time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    case = training(network, device, small=small)
    step = case.planned(min(case.budgets().values()))
    step(), step()
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device == "cuda" else []
    begun = time.perf_counter()
    with profile(activities=kinds) as found:
        step()
        host_ms = 1e3 * (time.perf_counter() - begun)
        if device == "cuda":
            torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "copies": []}
    for event in found.events():
        if str(event.device_type).endswith("CUDA"):
            kind = "copies" if "Memcpy" in event.name else "kernels"
            spans[kind].append((event.time_range.start, event.time_range.end))
    busy = {kind: _covered(some) / 1e3 for kind, some in spans.items()}
    both = _covered([*spans["kernels"], *spans["copies"]]) / 1e3
    every = [t for some in spans.values() for span in some for t in span]
    return {
        "host_ms": host_ms,
        "step_ms": (max(every) - min(every)) / 1e3 if every else None,
        "busy_ms": busy,
        "overlapped_ms": sum(busy.values()) - both,
        "launches": {kind: len(some) for kind, some in spans.items()},
    }


def compiled(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare planned steps of Inductor's kernels with `torch.compile`."""
    import torch

    if small:
        return {"left_out": "Inductor compiles for minutes"}
    case = training(network, device, small=small)
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected: list[Any] = []
    for name in ("torch.compile", "no budget", "75%", "50%"):
        mine, rows[name] = case.copied(), {}
        if name == "torch.compile":
            compiled_model = torch.compile(mine.model)
            steps[name] = replace(mine, model=compiled_model).eager()
        else:
            budget = None if name == "no budget" else name
            planned = mine.train_step(budget=budget, inductor=True)
            rows[name]["planned_bytes"] = planned.prepare(*case.batch).peak_bytes
            steps[name] = partial(planned, *case.batch)
        for _ in range(3):
            steps[name]()
        state = [value.cpu() for value in mine.model.state_dict().values()]
        expected = expected or state
        rows[name]["equal"] = all(map(torch.equal, state, expected))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[name]()
        rows[name]["added_bytes"] = torch.cuda.max_memory_allocated() - before
    return {"ms": medians(steps, device, _ROUNDS), "steps": rows}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of a union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
