"""A studied step on several equal devices: DistributedDataParallel or FSDP2.

    study = mt.memory(model, loss_fn, batch, optimizer, device="h100", mesh=(8,))
    study.least_budget                      # of one of the devices
    study.scaling()                         # and `mucudnn memory net.py:step --gpus 8`

The step is captured once, for one device. `passes/graph/sharding.py` rewrites its graph
as that of one rank, which is planned like any other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from mucudnn.arguments import check_choice, check_integer
from mucudnn.errors import UnsupportedError
from mucudnn.ir.devices import ASSUMED, DEVICES, DeviceFigures
from mucudnn.ir.graph import Phase
from mucudnn.passes.graph.sharding import DataParallel, data_parallel_step
from mucudnn.passes.planning.cutting import WHOLE, Split
from mucudnn.torch.lowering.lowered import NOTHING
from mucudnn.torch.plan_program import LoweredStep, PlanOptions

Shard = Literal["fsdp2", "ddp"]
"""How equal devices train one model."""

_UNIT = re.compile(r"^(.*?\d+)\.")
"""Matches the numbered submodule of a parameter."""

COUNTS = tuple(1 << power for power in range(11))
"""Numbers of devices of a table: 1 to 1,024."""


@dataclass(frozen=True)
class Ranks:
    """The number of devices that train together, and their kind of parallelism."""

    count: int = 1
    shard: Shard = "fsdp2"


ONE = Ranks()


def check_mesh(mesh: Sequence[int], shard: str, device: str, split: Split) -> int:
    """Return the number of devices of a mesh.

    Raises:
        ValueError: It is none that can be studied; says which are.
        TypeError: It is no sequence of integers.
    """
    check_choice("shard", shard, get_args(Shard))
    sizes = tuple(mesh)
    for size in sizes:
        check_integer("mesh", size, 1)
    if len(sizes) > 1:
        raise ValueError(
            f"mesh={sizes} has {len(sizes)} dimensions; only one is supported, such "
            "as mesh=(8,), over which shard='fsdp2' or 'ddp' divides the batch"
        )
    count = sizes[0] if sizes else 1
    if count > 1 and device not in DEVICES:
        raise ValueError(
            f"mesh={sizes} needs a device with published link rates, not {device!r}: "
            f"choose one of {', '.join(DEVICES)}"
        )
    if count > 1 and split != WHOLE:
        raise ValueError(
            f"mesh={sizes} cannot be combined with split={split!r}; accumulate= runs "
            "a batch in parts"
        )
    return count


def on_ranks(
    step: LoweredStep,
    options: PlanOptions,
    ranks: Ranks,
    parameters: Sequence[str],
    figures: DeviceFigures,
) -> LoweredStep:
    """Return a studied step as one of several devices has it.

    Raises:
        UnsupportedError: The optimizer's update cannot be sharded.
    """
    planner = step.planner(options)
    lowered, graph = planner.lowered, planner.lowered.graph
    sharded = ranks.shard == "fsdp2"
    heavy = [
        n.op for n in graph.nodes if n.phase is Phase.UPDATE and n.traits.expensive
    ]
    if step.update is not None or (sharded and heavy):
        raise UnsupportedError(
            "a step on several devices is studied with an optimizer whose update works "
            "on each element by itself, such as SGD, Adam or AdamW; this one "
            + (f"calls {heavy[0]}" if heavy else "is not captured")
        )
    # A unit for each numbered submodule; the first has all other parameters.
    tensors = dict(zip(step.names, lowered.inputs, strict=True))
    units: dict[str, dict[str, None]] = {"": {}}
    for name in parameters:
        if (tensor := tensors.get(name)) is not None:
            numbered = _UNIT.match(name)
            unit = units.setdefault(numbered[1] if numbered else "", {})
            unit[graph.storages[tensor]] = None
    parallel = DataParallel(
        ranks=ranks.count,
        units=[tuple(unit) for unit in units.values()],
        sharded=sharded,
        kept=(0,),  # FSDP2 does not free the root's parameters
        gather_ms=partial(figures.gather_ms, ranks=ranks.count),
        copy_bytes_per_ms=figures.bandwidth.value * ASSUMED.memory / 1e3,
    )
    found, profile = data_parallel_step(graph, planner.profile, parallel)
    calls = {node.name: NOTHING for node in found.nodes} | dict(lowered.calls)
    planner = replace(
        planner, lowered=replace(lowered, graph=found, calls=calls), profile=profile
    )
    return replace(step, planners={replace(options, split=WHOLE): planner})
