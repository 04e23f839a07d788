"""What of a step PyTorch's operations could write into memory that is given to them.

    python -m bench.torch.out_variants

Every distinct operation of a step that allocates its results is run on the CPU as it
is, and as the overload with `out`, if there is one with the same arguments, on tensors
of the results' sizes. That counts as able to write into an arena only if it writes
there, the same bits, and allocates no more than its results' worth beside them: an
overload that PyTorch generates computes a result of its own and copies it.

What those results have in use at most, and what all others have, is read from the plans
without a limit and of the least bytes: an arena and an allocator beside each other have
both at once, so the difference from the plan's own peak is what an arena would cost.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.torch import zoo
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Node
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn
from mucudnn.passes.liveness import rounded
from mucudnn.passes.scheduling.problem import origin
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.costs.measure import (
    call_key,
    estimated,
    evaluate,
    is_view,
    operands_of,
)
from mucudnn.torch.costs.meters import CpuMeter
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan_program import LoweredStep, PlanOptions

__all__ = ["Outcome", "outcome_of", "shares"]

GENERATED, NONE, MORE, DIFFERENT, RIGHT = (
    *("generated", "none", "allocates", "differs", "writes"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of an operation with its results given.

    Attributes:
        verdict: `writes` if it can be used; `generated` or `none` if there is no
            overload to try, `allocates` if it has memory of its own that the operation
            itself does not need, `differs` if its results are others.
        nbytes: Of its new results.
        fresh_ms: Time of the operation as it is; 0 if it was not tried.
        given_ms: The same with its results given.
    """

    verdict: str
    nbytes: int
    fresh_ms: float = 0.0
    given_ms: float = 0.0


def _case(name: str) -> zoo.Case:
    torch.manual_seed(0)
    if name == "gpt":
        return zoo.gpt(8, zoo.GPTConfig(dropout=0.0))
    return zoo.classifier(name, 16, 64 if name == "resnet18" else 96)


def shares(name: str) -> dict[str, Any]:
    """Of a training step with momentum: bytes that are allocated, by verdict."""
    case = _case(name)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
    captured = capture_step(case.model, case.loss_fn, optimizer, list(case.batch))
    parts = StepParts.of(case.model, optimizer)
    device = get_device("h200")  # times decide what leaves at the least, no more
    options = PlanOptions(costs=partial(estimated, device=device))
    planner = LoweredStep.of_captured(captured, parts).planner(options)
    lowered = planner.lowered
    known: dict[Any, Outcome] = {}
    fit: set[str] = set()
    times = {"fresh": 0.0, "given": 0.0}
    verdicts: Counter[str] = Counter()
    by_operation: dict[str, Counter[str]] = defaultdict(Counter)
    with torch.no_grad():
        for node in lowered.graph.nodes:
            if is_view(lowered, node) or node.mutates:
                continue
            key = call_key(lowered, node)
            if key not in known:
                known[key] = outcome_of(lowered, node)
            found = known[key]
            verdicts[found.verdict] += found.nbytes
            if found.verdict == RIGHT:
                fit.update(node.outputs)
                times["fresh"] += found.fresh_ms
                times["given"] += found.given_ms
            operation = str(lowered.calls[node.name].function)
            by_operation[found.verdict][operation] += found.nbytes
    total = sum(verdicts.values())
    plans = {"no limit": planner.plan(), "least": planner.plan(planner.least_budget())}
    return {
        "model": name,
        "bytes": total,
        "given_over_fresh_time": times["given"] / times["fresh"],
        "peaks": {
            limit: _peaks(plan.plan.schedule, fit) for limit, plan in plans.items()
        },
        "shares": {verdict: n / total for verdict, n in verdicts.items()},
        "operations": {
            verdict: {name: n / total for name, n in some.most_common(6)}
            for verdict, some in by_operation.items()
        },
    }


def _peaks(schedule: Schedule, fit: Collection[str]) -> dict[str, int]:
    """Most bytes of what an arena could have, of all others, and of both together."""
    graph = schedule.graph
    resident = set(schedule.resident)
    now, most = Counter[str](), Counter[str]()

    def change(by: int, *kinds: str) -> None:
        for kind in kinds:
            now[kind] += by
            most[kind] = max(most[kind], now[kind])

    def kinds(storage: str) -> tuple[str, str]:
        return ("arena" if origin(storage) in fit else "others"), "together"

    for step in schedule.instructions:
        match step:
            case Alloc(storage) | SwapIn(storage) if storage not in resident:
                change(rounded(graph.tensors[storage].nbytes), *kinds(storage))
            case Free(storage) if storage not in resident:
                change(-rounded(graph.tensors[storage].nbytes), *kinds(storage))
            case Compute(node):
                scratch = rounded(schedule.workspaces.get(node, 0))
                change(scratch, "others", "together")
                change(-scratch, "others", "together")
    return dict(most)


def outcome_of(lowered: Lowered, node: Node) -> Outcome:
    """Try one operation."""
    tensors = lowered.graph.tensors
    new = [name for name in node.outputs if tensors[name].alias is None]
    nbytes = sum(tensors[name].nbytes for name in new)
    call = lowered.calls[node.name]
    overload, generated = _with_out(call.function)
    if overload is None:
        return Outcome(GENERATED if generated else NONE, nbytes)
    outs = [a.name for a in overload._schema.arguments if a.is_out]
    operands = operands_of(lowered, node)
    [results] = evaluate(replace(call, results=(None,)), operands)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    if len(outs) != len(results):
        return Outcome(NONE, nbytes)
    given = [torch.empty_like(r).fill_(-1) for r in results]
    before = [g.data_ptr() for g in given]
    kwargs = {**call.kwargs, **dict(zip(outs, given, strict=True))}
    into = replace(call, function=overload, kwargs=kwargs)

    def fresh() -> None:
        evaluate(call, operands)

    def run() -> None:
        evaluate(into, operands)

    meter = CpuMeter()
    own, extra = meter.most_bytes([lambda: fresh, lambda: run])
    if [g.data_ptr() for g in given] != before or not all(
        g.stride() == r.stride() and torch.equal(g, r)
        for g, r in zip(given, results, strict=True)
    ):
        return Outcome(DIFFERENT, nbytes)
    if extra > max(0, own - nbytes):
        return Outcome(MORE, nbytes)
    return Outcome(RIGHT, nbytes, meter.time_ms(fresh), meter.time_ms(run))


def _with_out(function: Any) -> tuple[Any, bool]:
    """The overload with the same arguments and results given; if PyTorch made one."""
    packet = getattr(function, "overloadpacket", None)
    if packet is None:
        return None, False
    mine = _signature(function)
    generated = False
    for name in packet.overloads():
        overload = getattr(packet, name)
        if not any(a.is_out for a in overload._schema.arguments):
            continue
        if _signature(overload) != mine:
            continue
        if torch.Tag.generated in overload.tags:
            generated = True
        else:
            return overload, False
    return None, generated


def _signature(function: Any) -> Sequence[tuple[str, str]]:
    arguments = function._schema.arguments
    return [(a.name, str(a.type)) for a in arguments if not a.is_out]


def main(names: Sequence[str] = ("resnet18", "gpt")) -> None:
    """Print the shares of some networks as JSON."""
    torch.set_num_threads(1)
    found: Mapping[str, Any] = {name: shares(name) for name in names}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
