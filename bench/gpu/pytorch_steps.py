"""The sections of `bench.gpu.pytorch`: functions of a network and a device.

Each returns its figures and, under `wrong`, a line for everything that must not be.
"""

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.store import read_json, write_json
from mucudnn.errors import MucudnnError, PlanningError

__all__ = [
    *("batch_limits", "compiled", "faces", "inductor", "is_traced", "memory"),
    "numbers",
    *("sanitized", "sanitizer", "times", "trace"),
]

_SHARES = (0.9, 0.6, 0.3)
"""Budgets, between the least and what a step needs without one."""

_STEPS = 20
_ROUNDS = 8
_RESERVED = 1.02
"""Of what a plan says is reserved: what the allocator may reserve."""

Step = Callable[[], Any]


def faces(device: str, *, small: bool) -> dict[str, Any]:
    """Run one step by every face, in the settings that users have."""
    import torch

    import mucudnn.torch as mt

    def trained(**settings: Any) -> None:
        model, loss, batch = _case("gpt", device, small=True)
        mt.train_step(model, loss, _adamw(model), cache=None, **settings)(*batch)

    def scaled() -> None:
        scaler = torch.amp.GradScaler(device)
        with torch.autocast(device, dtype=torch.float16):
            trained(scaler=scaler)

    def compiled() -> None:
        torch._dynamo.reset()
        model, loss, batch = _case("resnet18", device, small=True)
        run = torch.compile(model, backend=mt.backend(cache=None))
        loss(run(batch[0]), batch[1]).backward()

    def studied() -> None:
        model, loss, batch = _case("gpt", device, small=True)
        mt.memory(model, loss, batch, _adamw(model)).plan()

    def hinted() -> None:
        torch._dynamo.reset()  # the networks share code, but no sizes
        model, loss, batch = _case("gpt", device, small=True)
        options = {"custom_partitioner_fn": mt.partitioner()}
        run = torch.compile(model, options=options)
        loss(run(batch[0]), batch[1]).backward()

    found: dict[str, Any] = {}
    named = {
        "train_step": trained,
        "train_step, autocast and scaler": scaled,
        "backend": compiled,
        "memory": studied,
        "partitioner": hinted,
    }
    if small:
        del named["partitioner"]  # Inductor needs a compiler of kernels
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
    model, loss, batch = _case(network, device, small=small)
    steps = 3 if small else _STEPS

    def state_of(made: Callable[[Any, Any], Step]) -> list[Any]:
        mine = copy.deepcopy(model)
        torch.manual_seed(1)
        step = made(mine, _adamw(mine))
        for _ in range(steps):
            step()
        return [value.double() for value in mine.state_dict().values()]

    eager = partial(_eager, loss=loss, batch=batch)
    wanted, again = state_of(eager), state_of(eager)
    noise = _difference(again, wanted)
    found: dict[str, Any] = {"eager_difference": noise, "difference": {}, "wrong": []}
    for share, budget in _budgets(model, loss, batch).items():
        made = partial(_planned, loss=loss, batch=batch, budget=budget)
        off = _difference(state_of(made), wanted)
        found["difference"][share] = off
        if off > 10 * noise:
            found["wrong"].append(f"at {share} of the memory it differs by {off:.2g}")
    return found


def sanitized(device: str, *, small: bool) -> dict[str, Any]:
    """Run steps that offload under PyTorch's sanitizer, which raises at a race."""
    model, loss, batch = _case("gpt", device, small=small)
    budget = min(_budgets(model, loss, batch).values())
    step = _planned(model, _adamw(model), loss=loss, batch=batch, budget=budget)
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

    model, loss, batch = _case(network, device, small=small)
    rows, wrong = {}, []
    budgets = _budgets(model, loss, batch)
    for share, budget in budgets.items():
        gc.collect()  # the copies that were planned before
        if device == "cuda":
            torch.cuda.empty_cache()
        own = _adamw(model)
        step = _planned(model, own, loss=loss, batch=batch, budget=budget)
        for _ in range(3):
            step()
        plan = step.keywords["planned"].plan  # type: ignore[attr-defined]
        row = {
            "budget_bytes": budget,
            "planned_bytes": plan.peak_bytes + plan.given_bytes,
            "planned_reserved_bytes": plan.reserved_bytes + plan.given_bytes,
        }
        if device == "cuda":
            stats = torch.cuda.memory_stats()
            for kind in ("requested", "allocated", "reserved"):
                row[f"{kind}_bytes"] = stats[f"{kind}_bytes.all.peak"]
            row["retries"] = stats["num_alloc_retries"]
            # Segments of the allocator's are larger than a rehearsal's whole step.
            if not small and row["requested_bytes"] > row["planned_bytes"]:
                wrong.append(f"at {share}: more is requested than planned")
            reserved = _RESERVED * row["planned_reserved_bytes"]
            if not small and row["reserved_bytes"] > reserved:
                wrong.append(f"at {share}: more is reserved than planned")
        rows[share] = row
        del step, own
        gc.collect()
    return {"budgets": rows, "wrong": wrong}


def batch_limits(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Find the largest batch in a part of the device's memory, planned and eager."""
    import torch

    whole = torch.cuda.mem_get_info()[1] if device == "cuda" else 1 << 30
    limit = whole // 8
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / whole)

    def fits(made: Callable[..., Step], batch_size: int) -> bool:
        try:
            model, loss, batch = _case(network, device, small=small, batch=batch_size)
            step = made(model, _adamw(model), loss=loss, batch=batch)
            step(), step()
        except (torch.OutOfMemoryError, PlanningError):
            return False
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        return True

    def largest(made: Callable[..., Step], most: int) -> int:
        low, size = 0, 1
        while size <= most and fits(made, size):
            low, size = size, 2 * size
        return low

    most = 2 if small else 4096
    ours = partial(_planned, budget=int(0.9 * limit))
    found = {"limit_bytes": limit, "eager": largest(_eager, most)}
    return {**found, "planned": largest(ours, most)}


def times(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare times at several budgets with what PyTorch offers, in turns."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model, loss, batch = _case(network, device, small=small)
    x, *targets = batch

    def loop(made: Any, forward: Callable[[Any], Any], **options: Any) -> Step:
        mine = copy.deepcopy(made)
        own = torch.optim.AdamW(mine.parameters(), 1e-4, **options)

        def step() -> Any:
            value = loss(forward(mine), *targets)
            value.backward()
            own.step()
            own.zero_grad()
            return value.detach()

        return step

    def on_host(mine: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
            return mine(x)

    steps = {
        "eager, foreach": loop(model, lambda m: m(x), foreach=True),
        "eager, fused": loop(model, lambda m: m(x), fused=True),
        "checkpoint": loop(model, lambda m: checkpoint(m, x, use_reentrant=False)),
        "save_on_cpu": loop(model, on_host),
    }
    if not small:
        fast = torch.compile(model)
        steps["torch.compile"] = loop(model, lambda m: fast(x))
    for share, budget in {"no budget": None, **_budgets(model, loss, batch)}.items():
        mine = copy.deepcopy(model)
        made = partial(_planned, loss=loss, batch=batch, budget=budget)
        steps[f"planned, {share}"] = made(mine, _adamw(mine))
    return {"ms": _medians(steps, device, 2 if small else _ROUNDS)}


def trace(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Trace a step that offloads: kernels, copies, what overlaps, and host time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    model, loss, batch = _case(network, device, small=small)
    budget = min(_budgets(model, loss, batch).values())
    step = _planned(model, _adamw(model), loss=loss, batch=batch, budget=budget)
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


def inductor(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare compiled passes with a plan's hints with those without."""
    import torch

    import mucudnn.torch as mt

    if small:
        return {"left_out": "Inductor compiles for minutes"}
    model, loss, batch = _case(network, device, small=small)
    x, *targets = batch
    steps, peaks = {}, {}
    budgets = {"no budget": None, **_budgets(model, loss, batch)}
    for share, budget in budgets.items():
        torch._dynamo.reset()
        options = {"custom_partitioner_fn": mt.partitioner(budget=budget)}
        for name, given in (("with hints", options), ("without", {})):
            if name == "without" and budget is not None:
                continue
            run = torch.compile(copy.deepcopy(model), options=given)

            def step(run: Any = run) -> None:
                loss(run(x), *targets).backward()

            step()
            torch.cuda.reset_peak_memory_stats()
            step()
            steps[f"{share}, {name}"] = step
            peaks[f"{share}, {name}"] = torch.cuda.max_memory_allocated()
    return {"ms": _medians(steps, device, _ROUNDS), "allocated_bytes": peaks}


def compiled(network: str, device: str, *, small: bool) -> dict[str, Any]:
    """Compare planned steps of Inductor's kernels with `torch.compile`, with SGD."""
    import torch

    import mucudnn.torch as mt

    if small:
        return {"left_out": "Inductor compiles for minutes"}
    model, loss, batch = _case(network, device, small=small)
    x, *targets = batch
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected: list[Any] = []
    for name in ("torch.compile", "no budget", "75%", "50%"):
        mine = copy.deepcopy(model)
        own = torch.optim.SGD(mine.parameters(), 1e-3)
        rows[name] = row = {}
        if name == "torch.compile":
            run = torch.compile(mine)

            def step(run: Any = run, own: Any = own) -> None:
                own.zero_grad()
                loss(run(x), *targets).backward()
                own.step()

        else:
            budget = None if name == "no budget" else name
            planned = mt.train_step(mine, loss, own, budget=budget, inductor=True)
            row["planned_bytes"] = planned.prepare(*batch).peak_bytes

            def step(planned: Any = planned) -> None:
                planned(*batch)

        for _ in range(3):
            step()
        state = [value.cpu() for value in mine.state_dict().values()]
        expected = expected or state
        row["equal"] = all(map(torch.equal, state, expected))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        row["added_bytes"] = torch.cuda.max_memory_allocated() - before
        steps[name] = step
    return {"ms": _medians(steps, device, _ROUNDS), "steps": rows}


# -- steps


def _case(
    network: str, device: str, *, small: bool, batch: int | None = None
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a model in training mode, its loss and a batch, on the device."""
    import torch

    from bench.step_torch import NETWORKS
    from bench.torch.zoo import GPTConfig, gpt

    torch.manual_seed(0)
    if network.startswith("gpt"):
        layers, width, heads, length, words = (12, 768, 12, 1024, 50257)
        if small:
            layers, width, heads, length, words = (1, 32, 2, 16, 64)
        elif network == "gpt":
            layers, width, heads, length, words = (4, 256, 4, 256, 4096)
        config = GPTConfig(layers, width, heads, length, words, dropout=0.0)
        count = batch or (2 if small else 16 if network == "gpt" else 8)
        found = gpt(count, config)
        tensors = tuple(tensor.to(device) for tensor in found.batch)
        return found.model.to(device), found.loss_fn, tensors
    count = batch or (2 if small else 256 if network == "resnet50" else 64)
    pixels = 32 if small else 224
    x = torch.randn(count, 3, pixels, pixels, device=device)
    y = torch.randint(1000, (count,), device=device)
    model = NETWORKS["resnet18" if small else network]().train().to(device)
    return model, torch.nn.functional.cross_entropy, (x, y)


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), 1e-4)


def _eager(model: Any, optimizer: Any, *, loss: Any, batch: Any) -> Step:
    x, *targets = batch

    def step() -> Any:
        value = loss(model(x), *targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _planned(
    model: Any, optimizer: Any, *, loss: Any, batch: Any, budget: int | None
) -> Step:
    import mucudnn.torch as mt

    step = mt.train_step(model, loss, optimizer, budget=budget, cache=None)
    step.prepare(*batch)
    return partial(_run, planned=step, batch=batch)


def _run(*, planned: Any, batch: Any) -> Any:
    return planned(*batch)


def _budgets(model: Any, loss: Any, batch: Any) -> dict[str, int]:
    """Return budgets between a step's least and what it needs without one.

    Finding them takes two plans. The file `$BUDGETS` keeps them for other sections.
    """
    import mucudnn.torch as mt

    sizes = [tuple(t.shape) for t in (*model.parameters(), *batch)]
    key, file = str(sizes), os.environ.get("BUDGETS")
    known = read_json(Path(file)) if file else {}
    if key not in known:
        mine = copy.deepcopy(model)
        made = partial(mt.train_step, mine, loss, _adamw(mine), cache=None)
        most = made().prepare(*batch).peak_bytes
        try:
            made(budget="1KiB").prepare(*batch)
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            known[key] = [e.least_bytes, most]
        else:
            raise MucudnnError("a step was planned in 1 KiB")
        if file:
            write_json(Path(file), known)
    least, most = known[key]
    return {f"{share:.0%}": max(least, int(share * most)) for share in _SHARES}


def _medians(steps: Mapping[str, Step], device: str, rounds: int) -> dict[str, float]:
    """Return medians in ms of steps that take turns."""
    import torch

    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                taken[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(ms) for name, ms in taken.items()}


def _difference(found: list[Any], wanted: list[Any]) -> float:
    """Return the largest difference relative to a tensor's largest number."""
    worst = 0.0
    for mine, theirs in zip(found, wanted, strict=True):
        off = float((mine - theirs).abs().max())
        if off != off:
            return float("inf")
        worst = max(worst, off / max(1e-30, float(theirs.abs().max())))
    return worst


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of a union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
