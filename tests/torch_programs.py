"""Training programs whose Python state changes, by planned steps and by eager mode.

A program is a function that builds a `Training`. It is built twice from the same seeds:
once for a loop in eager mode, once for `mucudnn.torch.train_step`. After each step the
loss, the batch, all parameters and buffers, the optimizer's state and what else the
program watches have to be equal, bit for bit. A planned step may raise an error of this
library instead, if it leaves everything as it was before: that step is then made in
eager mode, and the comparison goes on from there, so that anything that the refused
call did change shows. Any other error is a difference, unless eager mode raises the
same type.
"""

import ast
import collections
import contextlib
import decimal
import functools
import gc
import itertools
import os
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers
from torch.utils import _pytree as pytree

import mucudnn
import mucudnn.torch as mt
from mucudnn.errors import MucudnnError
from mucudnn.torch.costs.meters import CpuMeter, Links

STEPS = 4
CHANGE_AT = 2
"""The step, counted from 0, before which a program's change is made."""


def nothing(*_: Any) -> None:
    pass


def no_context(_: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass
class Training:
    """A model, how it is trained, and what happens between its steps.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        batches: Arguments of the steps, used in turn.
        loss_fn: Called with the model's result and the rest of a batch.
        change: Called once, before the third step.
        before: Called with the step's number before each step.
        after: Called with the step's number and its loss after each step.
        around: Gives a context for the step of a number.
        watched: Further Python state or tensors to compare after each step.
        undo: Called at the end, where a program changes more than itself.
        options: Other arguments of `train_step`; "accumulate", "clip_norm" and
            "clip_value" are heeded in eager mode too.
        steps: How many steps are made.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[tuple[Any, ...]]
    loss_fn: Callable[..., Any] = functional.cross_entropy
    change: Callable[[], Any] = nothing
    before: Callable[[int], Any] = nothing
    after: Callable[[int, torch.Tensor], Any] = nothing
    around: Callable[[int], contextlib.AbstractContextManager[Any]] = no_context
    watched: Callable[[], Any] = nothing
    undo: Callable[[], Any] = nothing
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS


@dataclass(frozen=True)
class Program:
    """How a training is built, and what is known of it.

    Attributes:
        build: Makes the training.
        keeps_plan: Whether the plan of the second step has to serve the later ones.
        changes_in_step: Whether the step itself changes Python state that counts, so
            that no captured step can stand for it.
        is_planned: Whether every step has to be planned: none is refused, and none
            runs in eager mode.
    """

    build: Callable[[], Training]
    keeps_plan: bool = False
    changes_in_step: bool = False
    is_planned: bool = False


class Programs(dict[str, Program]):
    """Programs by name; a call adds one, as a decorator does."""

    def __call__(
        self,
        build: Callable[[], Training] | None = None,
        *,
        name: str = "",
        **known: bool,
    ) -> Any:
        if build is None:
            return functools.partial(self, name=name, **known)
        name = name or build.__name__
        if name in self:
            raise ValueError(f"two programs have the name {name}")
        self[name] = Program(build, **known)
        return build

    def table(
        self, space: dict[str, Any], template: str, columns: str, **known: bool
    ) -> Callable[[str], None]:
        """Return a function that adds the programs of rows, see `rows_of`.

        Behind the columns, a row has words that say what is known of its program.
        """

        def add(text: str) -> None:
            for name, build, words in rows_of(text, space, template, columns):
                self(build, name=name, **known, **dict.fromkeys(words.split(), True))

        return add


def rows_of(
    text: str, space: dict[str, Any], template: str, columns: str
) -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yield the name of each row of a table, a function, and the cell behind.

    Bars are between cells; a row goes on where lines are indented. A cell that is a
    line of the template has statements, of which the last one in a function may be an
    expression, which is returned.

    Args:
        text: The rows: a name, a cell for each column, and perhaps one more.
        space: Globals of the functions: those of the caller's module.
        template: Source of a function `build`.
        columns: Names by which the template refers to the cells.
    """
    for row in re.sub(r"\n +", " ", text).strip().splitlines():
        name, *cells = (cell.strip() for cell in row.split("|"))
        named = dict(itertools.zip_longest(columns.split(), cells, fillvalue=""))
        behind = named.pop("", "")
        found: dict[str, Any] = {}
        # The file is the user's own, as messages and the recorder of reads say.
        code = compile(_filled_in(template, named), space["__file__"], "exec")
        exec(code, space, found)
        yield name, found["build"], behind


def _filled_in(template: str, cells: dict[str, str]) -> str:
    """Return a template with cells in their places."""
    lines: list[str] = []
    outer: set[str] = set()  # names that functions within `build` may set
    for line in template.splitlines():
        cell = cells.get(line.strip(" {}"))
        if cell is None:
            lines.append(line.format(**cells))
            continue
        nodes = ast.parse(cell or "pass").body
        stored = {
            node.id
            for node in ast.walk(ast.Module(nodes, []))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        indent = line[: -len(line.lstrip())]
        if len(indent) == 4:
            outer |= stored
        else:
            if stored & outer:
                lines.append(f"{indent}nonlocal {', '.join(sorted(stored & outer))}")
            if isinstance(nodes[-1], ast.Expr):
                nodes[-1] = ast.Return(nodes[-1].value)
        source = ast.unparse(ast.Module(nodes, [])).splitlines()
        lines += [indent + statement for statement in source]
    return "\n".join(lines)


@dataclass
class Record:
    """What a step gave: its results and all state behind it, or an error."""

    results: Any
    state: dict[str, Any]
    error: BaseException | None = None


@dataclass
class Report:
    """How planned steps compare with eager mode.

    Attributes:
        differences: What differs; of a program without faults nothing.
        refusals: Errors of this library.
        warned: Warnings given during planned steps.
        plans: The plan in force after each step; None before the first.
    """

    differences: list[str] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
    steps: int = 0

    @property
    def ran_eagerly(self) -> int:
        """How many warnings say that a step ran in eager mode."""
        return sum("eager" in message for message in self.warned)

    def was_planned(self) -> bool:
        """Whether every step was planned."""
        return not self.refusals and not self.ran_eagerly

    def kept_its_plan(self) -> bool:
        """Whether one plan served all steps from the second on."""
        second = self.plans[1]
        return (
            second is not None
            and all(plan is second for plan in self.plans[1:])
            and self.was_planned()
        )

    def plan_count(self) -> int:
        """How many plans there were."""
        return len({id(plan) for plan in self.plans if plan is not None})


MODULES = """
def build():
    def read(s, out):
        {result}
    m = Reading(read, {attributes})
    def change():
        {change}
    return trained(m, {optimizer}change=change)
"""
"""Of a module `m` that does something with its network's output.

A row has the module's attributes, the module's result, and a change of the module.
"""


# --- running a program both ways


def compare(program: Program, seed: int = 0, **options: Any) -> Report:
    """Return how planned steps of a program compare with eager mode.

    Args:
        program: The program.
        seed: Of all generators of random numbers, when the program is built.
        options: Further arguments of `train_step`.
    """
    with built(program, seed) as training:
        wanted = eager_records(training)
    with built(program, seed) as training:
        return planned_report(training, wanted, options)


@contextlib.contextmanager
def built(program: Program, seed: int) -> Iterator[Training]:
    with fresh_state(seed):
        training = program.build()
        try:
            yield training
        finally:
            training.undo()


def eager_records(training: Training) -> list[Record]:
    records: list[Record] = []
    loss = torch.zeros(())
    for number in range(training.steps):
        batch = prepared(training, number)
        error, results = None, None
        try:
            with training.around(number):
                results = eager_step(training, batch)
        except Exception as e:
            error = e
        loss = loss_of(results)
        records.append(Record(copied(results), state_of(training), error))
        if error is not None:
            break
        training.after(number, loss)
    return records


def planned_report(
    training: Training, wanted: Sequence[Record], options: dict[str, Any]
) -> Report:
    report = Report()
    step: Any = None
    for number, record in enumerate(wanted):
        batch = prepared(training, number)
        before = state_of(training)
        try:
            with (
                warnings.catch_warnings(record=True) as caught,
                training.around(number),
            ):
                warnings.simplefilter("always")
                if step is None:
                    step = new_step(training, options)
                results = step(*batch)
        except Exception as e:
            if not is_ours(e):
                if type(e) is not type(record.error):
                    report.differences.append(
                        f"step {number}: raw {type(e).__name__}: {e}"
                    )
                break
            report.refusals.append(e)
            if not str(e).strip():
                report.differences.append(f"step {number}: {type(e).__name__} is mute")
            report.differences += [
                f"step {number}, refused ({e}): {found}"
                for found in different(before, state_of(training))
            ]
            if record.error is not None:
                break
            with training.around(number):
                results = eager_step(training, batch)
        else:
            if record.error is not None:
                report.differences.append(
                    f"step {number}: went on where eager mode raises {record.error!r}"
                )
                break
        report.steps += 1
        report.warned += [str(w.message) for w in caught]
        report.plans.append(plan_of(step))
        found = [
            *different({"results": record.results}, {"results": copied(results)}),
            *different(record.state, state_of(training), fresh_state_is_none=True),
        ]
        report.differences += [f"step {number}: {one}" for one in found]
        if report.differences:
            break
        training.after(number, loss_of(results))
    return report


def is_ours(error: Exception) -> bool:
    """Return whether an error was raised by this library on purpose.

    Of arguments that no step takes, these are ValueError and TypeError, raised by a
    line of the library itself.
    """
    if isinstance(error, MucudnnError):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    return (
        isinstance(error, ValueError | TypeError)
        and Path(mucudnn.__file__).parent in Path(raised_in.filename).parents
        and (raised_in.line or "").startswith("raise ")
    )


def prepared(training: Training, number: int) -> tuple[Any, ...]:
    """Return the batch of a step, once what happens before that step has happened."""
    if number == CHANGE_AT:
        training.change()
    training.before(number)
    return training.batches[number % len(training.batches)]


def new_step(training: Training, options: dict[str, Any]) -> Any:
    return mt.train_step(
        training.model,
        training.loss_fn,
        training.optimizer,
        **{"cache": None, **training.options, **options},
    )


def plan_of(step: Any) -> Any:
    """Return the plan of the last step; None if there was none yet."""
    try:
        return step.plan
    except (AttributeError, RuntimeError):
        return None


def eager_step(training: Training, batch: tuple[Any, ...]) -> Any:
    """Make one step as a loop of PyTorch's does."""
    options, optimizer = training.options, training.optimizer
    optimizer.zero_grad()
    training.model.zero_grad()  # of what the optimizer does not have, too
    parts = options.get("accumulate", 1)
    size = next(
        len(leaf)
        for leaf in pytree.tree_leaves(batch)
        if isinstance(leaf, torch.Tensor)
    )
    results, total = None, torch.zeros(())
    for part in cut(batch, parts):
        model_input, *rest = part
        results = training.loss_fn(called(training.model, model_input), *rest)
        share = loss_of(results)
        if parts > 1:
            share = share * (len(rest[0]) / size)
            total = total + share.detach()
        share.backward()
    held = list(training.model.parameters())
    if "clip_value" in options:
        nn.utils.clip_grad_value_(held, options["clip_value"])
    if "clip_norm" in options:
        nn.utils.clip_grad_norm_(held, options["clip_norm"])
    # A step called under autocast casts the forward pass alone, as PyTorch recommends.
    with torch.autocast("cpu", enabled=False):
        optimizer.step()
    return results if parts == 1 else total


def cut(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    if parts == 1:
        return [batch]
    return list(zip(*[tensor.tensor_split(parts) for tensor in batch], strict=True))


def called(model: nn.Module, model_input: Any) -> Any:
    if isinstance(model_input, dict):
        return model(**model_input)
    return model(*model_input) if isinstance(model_input, tuple) else model(model_input)


def loss_of(results: Any) -> Any:
    return results[0] if isinstance(results, tuple) else results


# --- comparing


def state_of(training: Training) -> dict[str, Any]:
    """Return copies of everything that a step may change, by name."""
    model, optimizer = training.model, training.optimizer
    found: dict[str, Any] = {}
    for kind, module in (("model", model), ("loss", training.loss_fn)):
        if isinstance(module, nn.Module):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{kind}.{name}"] = tensor
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            found[f"parameter {i}.{j}"] = parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"state {i}.{j}.{key}"] = value
    for i, leaf in enumerate(pytree.tree_leaves(list(training.batches))):
        found[f"batch {i}"] = leaf
    found["watched"] = training.watched()
    found["generator"] = torch.get_rng_state()
    return {name: copied(value) for name, value in found.items()}


def copied(values: Any) -> Any:
    """Return values with copies of tensors; a tracer's tensor is named only."""

    def copy(tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"a {type(tensor).__name__}"
        return tensor.detach().clone()

    return pytree.tree_map_only(torch.Tensor, copy, values)


def different(
    wanted: dict[str, Any], found: dict[str, Any], fresh_state_is_none: bool = False
) -> list[str]:
    """Return the names of values that differ, and how.

    Args:
        wanted: Values by name.
        found: The values to compare them with.
        fresh_state_is_none: Whether state of the optimizer that is zero may be there
            where eager mode has made none yet, for want of a gradient.
    """
    names = [*wanted, *(name for name in found if name not in wanted)]
    return [
        f"{name} is {shown(found.get(name))}, wanted {shown(wanted.get(name))}"
        for name in names
        if not identical(wanted.get(name), found.get(name))
        and not (
            fresh_state_is_none
            and name.startswith("state ")
            and wanted.get(name) is None
            and is_zero(found.get(name))
        )
    ]


def is_zero(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.any()


def identical(one: Any, other: Any) -> bool:
    """Return whether all leaves are equal, numbers bit for bit but for a zero's sign.

    A momentum that begins as zeros gives 0.0 where one that begins as a copy of the
    gradient gives -0.0.
    """
    mine, how = pytree.tree_flatten(one)
    theirs, other_how = pytree.tree_flatten(other)
    return how == other_how and all(map(_identical_leaves, mine, theirs))


def _identical_leaves(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (one == other or one != one)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.device.type == "meta":
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def shown(value: Any) -> str:
    return " ".join(repr(value).split())[:80]


# --- state of the process


_HOOKS = [
    value
    for holder in (of_modules, of_optimizers)
    for name, value in vars(holder).items()
    if name.startswith("_global") and isinstance(value, collections.OrderedDict)
]
"""Hooks of all modules and all optimizers, by their registries."""

_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
    ),
    (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    ),
    (lambda: torch.backends.cudnn.benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    (
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
    ),
    (lambda: decimal.getcontext().copy(), decimal.setcontext),
    (np.geterr, lambda errors: np.seterr(**errors)),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (
        lambda: threading.current_thread().name,
        lambda name: setattr(threading.current_thread(), "name", name),
    ),
]


@contextlib.contextmanager
def fresh_state(seed: int = 0) -> Iterator[None]:
    """Seed all generators; put back settings, hooks and the environment at the end."""
    switches = [(get(), put) for get, put in _SWITCHES]
    hooks = [dict(registry) for registry in _HOOKS]
    environment = dict(os.environ)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_device(None)
        for value, put in switches:
            put(value)
        for registry, kept in zip(_HOOKS, hooks, strict=True):
            registry.clear()
            registry.update(kept)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def free_costs() -> Iterator[None]:
    """Let every call take as long as any other, and copies no time."""
    with (
        mock.patch.object(CpuMeter, "time_ms", return_value=1.0),
        mock.patch.object(CpuMeter, "links", return_value=Links(1e12, 1e12)),
    ):
        yield


# --- parts that programs share


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def vectors(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.randint(0, 4, (count,))


def images(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 6, 6), torch.randint(0, 4, (count,))


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)


def trained(model: nn.Module, **others: Any) -> Training:
    """Return the training of a model of vectors by plain SGD, unless told otherwise."""
    others = {"optimizer": sgd(model, 0.0), "batches": [vectors(), vectors()], **others}
    return Training(model, **others)


class Reading(nn.Module):
    """A small network, and a function of the module and its output.

    Args:
        read: Called with the module and the network's output; gives the result.
        attributes: Set on the module.
    """

    def __init__(
        self, read: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU())
        self.read = read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, self.net(x))
