"""Digests of plans, PyTorch steps, commands' outputs and public names.

`tests/goldens.json` holds them. A change that is meant to keep results keeps every
digest; one that is meant to change them writes the file anew and says which and why:

    python -m tests.goldens check [PART...]
    python -m tests.goldens write [PART...]

Parts are `plans`, `networks` (more of them, for minutes), `torch`, `commands`, `names`.
Nothing in it depends on a clock: costs are published figures or constants.
"""

import argparse
import contextlib
import hashlib
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import mucudnn
from mucudnn.cli import main
from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import policy_names

FILE = Path(__file__).with_suffix(".json")
QUICK = {"lenet": 32, "resnet20": 16, "alexnet": 16, "unet2d": 1}
LARGE = {
    "cifar_quick": 64,
    "densenet40": 8,
    "digits": 64,
    "googlenet": 16,
    "inception_v4": 4,
    "resnet18": 16,
    "resnet50": 16,
    "vgg16": 16,
}
SHARES = (0.0, 0.3, 0.8)
"""Of the way from the minimum feasible budget to the peak without a budget."""
POLICIES = policy_names()


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def instructions_of(schedule: Any) -> list[list[str]]:
    return [
        [type(step).__name__, step.node if hasattr(step, "node") else step.tensor]
        for step in schedule.instructions
    ]


def plan_of(request: StepRequest) -> list[Any]:
    """Return what identifies a plan: copies, recomputation, workspaces, bytes, time."""
    try:
        plan = plan_step(request)
    except PlanningError as e:
        return [type(e).__name__, str(e)]
    schedule = plan.schedule
    places = []
    with contextlib.suppress(PlanningError):
        placed = place_step(request, plan)
        places = [placed.nbytes, instructions_of(placed.schedule)]
    return [
        instructions_of(schedule),
        dict(schedule.workspaces),
        plan.peak_bytes,
        float(f"{plan.prediction.step_ms:.10g}"),
        places,
    ]


def plans(networks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name, batch in networks.items():
        graph = with_updates(training_graph(get_model(name)(batch)), Momentum())
        profile = estimate(graph, "h200")
        most = unbounded(graph, profile).peak_bytes
        for policy in POLICIES:
            free = StepRequest(graph, profile, policy=policy)
            least = minimum_budget(free)
            for share in SHARES:
                budget = least + int(share * max(0, most - least))
                found = plan_of(
                    StepRequest(graph, profile, policy=policy, budget=budget)
                )
                yield f"{name}/{policy}/{share}", digest([least, budget, found])


def torch_steps() -> Iterator[tuple[str, str]]:
    from tests import golden_models

    yield from golden_models.steps(digest, instructions_of)


PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
NULL = ("--backend", "null", "--cache", "none")
MEMORY = ("memory", "lenet", "--batch", "8")
CALLS = (
    ("tune", *PROBLEM, *NULL, "--workspace-limit", "1KiB,1MiB"),
    ("tune", *PROBLEM, *NULL, "--total-workspace", "1MiB"),
    ("tune", *PROBLEM, *NULL, "--plan-only"),
    ("tune", "--list"),
    ("explain", *PROBLEM, *NULL, "--directions", "all"),
    (*MEMORY, "--budget", "2MiB", "--curve"),
    (*MEMORY, "--min-budget", "--policy", "planned,lru"),
    (*MEMORY, "--inference"),
    ("fleet", "lenet", "--devices", "k80,p100", "--batch", "8"),
    ("train", "--list"),
)


def commands() -> Iterator[tuple[str, str]]:
    """Yield digests of `--help` of every command and of outputs as text and JSON."""
    runner = CliRunner(env={"COLUMNS": "80"})
    for command in ("", *main.list_commands(click.Context(main))):
        shown = runner.invoke(main, [*command.split(), "--help"])
        yield f"help {command}".strip(), digest(shown.output)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for call in CALLS:
            shown = runner.invoke(main, call, catch_exceptions=False)
            yield "text " + " ".join(call), digest(shown.stdout)
            shown = runner.invoke(main, [*call, "--json", "-"], catch_exceptions=False)
            found = json.loads(shown.stdout)
            yield "json " + " ".join(call), digest(without_machine(found))


def without_machine(value: Any) -> Any:
    """Return the value without what differs by machine: versions, devices, dates."""
    if isinstance(value, dict):
        machine = {"environment", "machine", "mucudnn", "version", "date"}
        return {k: without_machine(v) for k, v in value.items() if k not in machine}
    return [without_machine(v) for v in value] if isinstance(value, list) else value


def names(*rooms: str) -> Iterator[tuple[str, str]]:
    """Yield the signature of every public name, and of those in some rooms."""
    for module in (mucudnn, *map(importlib.import_module, rooms)):
        for name in module.__all__:
            value = getattr(module, name)
            members = [n for n in dir(value) if not n.startswith("_")]
            try:
                signature = [
                    p.name for p in inspect.signature(value).parameters.values()
                ]
            except (TypeError, ValueError):
                signature = []
            found = members if inspect.isclass(value) else []
            yield f"{module.__name__}.{name}", " ".join([*signature, "|", *found])


PARTS: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "plans": lambda: plans(QUICK),
    "networks": lambda: plans(LARGE),
    "torch": torch_steps,
    "commands": commands,
    "names": lambda: names("mucudnn.torch"),
}


def differences(part: str) -> list[str]:
    """Return a line for every digest of a part that is not that of the file."""
    known = json.loads(FILE.read_text()).get(part, {})
    found = dict(PARTS[part]())
    return [
        f"{part}: {key}: {known.get(key, 'new')} -> {found.get(key, 'gone')}"
        for key in sorted(known.keys() | found.keys())
        if known.get(key) != found.get(key)
    ]


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("check", "write"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args(arguments)
    parts = given.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if given.action == "check":
        lines = [line for part in parts for line in differences(part)]
        print("\n".join(lines) or "no differences")  # noqa: T201
        return bool(lines)
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    stored.update((part, dict(PARTS[part]())) for part in parts)
    FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
