"""The tensors of a step: batch, parameters, buffers, state; and its settings."""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mucudnn.arguments import check_function, check_integer, check_number, check_type
from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.optimizers import has_plain_rate, make_state
from mucudnn.torch.capture.python_state import Kind, Read
from mucudnn.torch.distributed.sharding import groups_of, local_of
from mucudnn.torch.source_lines import line_now

_DECIDED = (bool, str, type(None))
"""Types whose values are part of a plan."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a step.

    Attributes:
        tensors: All tensors among them, in order.
        form: Nesting of the arguments, as a pytree specification.
        leaves: Every leaf of the form: None for a tensor, else a value in a tuple.
        given: The arguments themselves, by position and by name.
    """

    tensors: tuple[torch.Tensor, ...]
    form: Any
    leaves: tuple[tuple[Any] | None, ...]
    given: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Batch":
        """Flatten the arguments of a call.

        Raises:
            TypeError: An argument is no tensor, bool, str or None.
            UnsupportedError: The call is within `torch.inference_mode()`, or within
                a step that is captured.
        """
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "the step was called within torch.inference_mode(), which disables "
                "gradients; call it outside"
            )
        if get_proxy_mode() is not None:
            raise UnsupportedError(
                f"a step is called within another one{line_now()}, which is captured; "
                "call one after the other"
            )
        if not args and not kwargs:
            raise TypeError(
                "the step was called without a batch; call it as step(x, y)"
            )
        plain = tuple(dict(a) if isinstance(a, Mapping) else a for a in args)
        flat, form = pytree.tree_flatten((plain, dict(kwargs)))
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                check_tensor("the batch", leaf)
                kind = type(leaf)
                own = kind.__module__.partition(".")[0] != "torch"
                if own or issubclass(kind, torch.nn.Parameter):
                    raise UnsupportedError(
                        f"the batch has a {kind.__name__}, which a captured model sees "
                        "as a plain tensor; pass "
                        "tensor.detach().as_subclass(torch.Tensor)"
                    )
            elif not isinstance(leaf, _DECIDED):
                raise TypeError(
                    f"the batch has a {type(leaf).__name__}; it must contain tensors "
                    "only, as in step(x, y), step((x1, x2), y) or step(**batch); "
                    "pass a number that changes between steps as torch.tensor(number); "
                    "register a dataclass by torch.export.register_dataclass(cls)"
                )
        tensors = tuple(leaf for leaf in flat if isinstance(leaf, torch.Tensor))
        leaves = tuple(None if isinstance(v, torch.Tensor) else (v,) for v in flat)
        return cls(tensors, form, leaves, (tuple(args), dict(kwargs)))

    @property
    def kind(self) -> tuple[Any, Any, bool]:
        """The leaves, the form, and whether any tensor has attributes.

        A captured step is used only for batches that are equal in these.
        """
        return self.leaves, self.form, any(map(attributes_of, self.tensors))

    @property
    def signature(self) -> str:
        """The shapes and types of the tensors, as text for messages."""
        shown = [
            f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in self.tensors
        ]
        return f"a batch of {', '.join(shown)}" if shown else "a batch without tensors"

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with other tensors.

        With its own tensors, they are the very lists and dicts that the user gave.
        """
        if all(map(operator.is_, tensors, self.tensors)):
            return self.given
        given = iter(tensors)
        flat = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(flat, self.form)
        return tuple(args), kwargs

    def parts(
        self, tensors: Sequence[torch.Tensor], count: int
    ) -> list[tuple[list[torch.Tensor], float]]:
        """Split tensors along axis 0; return each part, and the divisor of its loss.

        Raises:
            ValueError: The tensors differ in the size of axis 0.
        """
        if count == 1:
            return [(list(tensors), 1)]
        sizes = {t.shape[0] if t.dim() else None for t in tensors}
        size = sizes.pop()
        if sizes or not size:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise ValueError(
                f"accumulate={count} splits every tensor of the batch along its first "
                f"axis, whose lengths must be equal, and not 0; the shapes are {shapes}"
            )
        count = min(count, int(size))
        cut = [t.tensor_split(count) for t in tensors]
        rows = [list(row) for row in zip(*cut, strict=True)]
        even = size % count == 0
        return [(row, count if even else size / row[0].shape[0]) for row in rows]


def check_tensor(of: str, tensor: torch.Tensor, *, hooks: bool = False) -> None:
    """Refuse a tensor whose meaning would be lost.

    Raises:
        UnsupportedError: Its class computes in its own way, it was made in inference
            mode, or it has hooks and may not have any.
    """
    kind: Any = type(tensor)
    if kind is not torch.Tensor and _computes_itself(kind):
        raise UnsupportedError(
            f"{of} has a {kind.__name__}, a tensor subclass with its own "
            "__torch_function__; pass a plain tensor, "
            "tensor.as_subclass(torch.Tensor)"
        )
    if tensor.is_inference():
        raise UnsupportedError(
            f"{of} has a tensor created within torch.inference_mode(), which cannot "
            "be saved for the backward pass; pass a clone, or create it within "
            "no_grad()"
        )
    if not hooks and tensor.requires_grad and tensor._backward_hooks:
        raise UnsupportedError(
            f"{of} has a tensor with a hook, which would not run, as a step computes "
            "no gradients of the batch; remove it, or use a hook of a module"
        )


@functools.cache
def _computes_itself(kind: Any) -> bool:
    """Return whether a class of tensors has a `__torch_function__` of its own."""
    own = (b for b in kind.__mro__ if "__torch_function__" in vars(b))
    return bool(next(own).__module__.partition(".")[0] != "torch")


def called(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a model with the first argument of a step and the keyword arguments.

    A tuple is unpacked to positional arguments, a dict to keyword arguments.
    """
    try:
        match args[0] if args else ():
            case Mapping() as named:
                return model(**named, **kwargs)
            case tuple() | list() as several:
                return model(*several, **kwargs)
            case one:
                return model(one, **kwargs)
    except TypeError as e:
        if len(args) == 1 and isinstance(args[0], tuple | list | Mapping):
            e.add_note(
                "the step was given one argument, which is the model's input; pass the "
                "arguments of loss_fn after it: step(x, y), not step((x, y)); a model "
                "that takes a tuple as one argument is given step(((x, y),))"
            )
        raise


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's attributes, without those that `torch.compile` gives it."""
    compilers = ("_dynamo", "_has_dynamo")
    return {k: v for k, v in vars(tensor).items() if not k.startswith(compilers)}


@dataclass(frozen=True)
class StepSettings:
    """Settings of gradients: accumulation, clipping and loss scaling.

    Attributes:
        accumulate: Number of micro-batches, along axis 0. Their gradients are summed,
            with each one's loss weighted by its share of the batch.
        clip_norm: Maximum norm of all gradients together.
        clip_value: Maximum magnitude of an entry of a gradient.
        scaler: Scales the loss and skips steps whose gradients are not finite.
        recorded: Whether the optimizer's update is part of a captured step; else the
            optimizer makes it itself, behind one.
        floats: Python numbers, or tuples of them, that change from step to step: inputs
            of the graph, as learning rates are.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: torch.amp.GradScaler | None = None
    recorded: bool = True
    floats: tuple[Read, ...] = ()

    def __post_init__(self) -> None:
        parts = check_integer("accumulate", self.accumulate, 1)
        object.__setattr__(self, "accumulate", parts)
        for name in ("clip_norm", "clip_value"):
            if (limit := getattr(self, name)) is not None:
                check_number(name, limit, 0, above=True, finite=False)
        if self.scaler is not None:
            scaler = "a torch.amp.GradScaler or None"
            check_type("scaler", self.scaler, torch.amp.GradScaler, scaler)

    @property
    def scales(self) -> bool:
        """True if the loss is scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def key(self) -> tuple[Any, ...]:
        """Settings of the scaler that are constants of a captured step."""
        if self.scaler is None or not self.scales:
            return ()
        return (
            self.scaler.get_growth_factor(),
            self.scaler.get_backoff_factor(),
            self.scaler.get_growth_interval(),
        )


PLAIN = StepSettings()
"""Settings without micro-batches, clipping or scaling."""


_CYCLED = frozenset({"betas", "momentum"})
"""Hyperparameters that schedulers change at every step beside the rate."""


def floats_in(value: Any) -> tuple[float, ...]:
    """Return a number, or a tuple of numbers, as a tuple; else an empty tuple."""
    several = value if type(value) is tuple else (value,)
    return several if all(type(number) is float for number in several) else ()


def scheduled_floats(
    optimizer: torch.optim.Optimizer, keys: Collection[str] = ()
) -> tuple[Read, ...]:
    """Return the hyperparameters that become inputs of a graph, beside the rates.

    `CyclicLR` and `OneCycleLR` leave `max_momentum` in groups whose momentum or beta
    they change: these are known before the first change.

    `keys` are further ones, which were seen to change.
    """
    return tuple(
        Read.of(Kind.ENTRY, group, key, f"{key!r} of the optimizer's group {i}")
        for i, group in enumerate(optimizer.param_groups)
        for key in group
        if (key in keys or ("max_momentum" in group and key in _CYCLED))
        and key != "lr"
        and floats_in(group[key])
    )


# Lookup of a step's tensors before each step.
#
# Checkpoints, schedules and users replace tensors between steps. A plan holds none of
# them: they are looked up in the model, the optimizer and the scaler.


_COMPILED = "torch.compile(model, backend=mt.backend(budget=...))"


_WRAPPERS = {
    "DataParallel": "use the module inside it, on one device",
    "DistributedDataParallel": (
        "train_step(DistributedDataParallel(model), ...) sums gradients if it wraps "
        "the whole model"
    ),
    "FullyShardedDataParallel": (
        f"shard the model with torch.distributed.fsdp.fully_shard; {_COMPILED} keeps a "
        "budget there"
    ),
}
"""Classes of modules that distribute a model -> what to use instead of a step."""


def check_parts(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Refuse invalid parts of a step.

    Raises:
        TypeError: A part has a wrong type.
        ValueError: The optimizer has no parameter of the model.
        UnsupportedError: The model is wrapped.
    """
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    check_function(
        "loss_fn", loss_fn, "a function of the model's result and of the batch"
    )
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn is the class {name}; pass an instance, {name}(...)")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    own = set(map(id, root_of(model, loss_fn).parameters()))
    if own.isdisjoint(id(p) for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            "optimizer has no parameter of the model or of a loss module; create it "
            "from model.parameters(), after anything that replaces parameters"
        )


def root_of(
    model: torch.nn.Module, loss_fn: Callable[..., Any] | None = None
) -> torch.nn.Module:
    """Return one module that contains the model, and the loss if it is a module.

    Raises:
        UnsupportedError: The model is distributed, compiled or scripted, or has tensors
            that wrap others.
    """
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if found := [kind for kind in kinds if kind in _WRAPPERS]:
            raise UnsupportedError(
                f"the model has a {found[0]}, whose collectives are not captured; "
                f"{_WRAPPERS[found[0]]}"
            )
        if kinds[0] == "OptimizedModule":
            raise UnsupportedError(
                "the model is compiled by torch.compile; pass the original model, or "
                "compile it with backend='mucudnn' and keep your training loop"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"the model has a scripted module ({module.original_name}), whose "
                "operations cannot be captured; use the module that was passed to "
                "torch.jit"
            )
    shards = {id(p.sharded_param) for g in groups_of(model) for p in g.fsdp_params}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor):
            check_tensor(f"{name} of the model", tensor, hooks=True)
        if is_traceable_wrapper_subclass(tensor) and id(tensor) not in shards:
            raise UnsupportedError(
                f"{name} of the model is a {type(tensor).__name__}, a tensor subclass "
                "that wraps other tensors; only plain tensors are supported"
            )
    root = torch.nn.Module()
    root.model = model
    if isinstance(loss_fn, torch.nn.Module):
        root.loss_fn = loss_fn
    return root


def places_of(
    root: torch.nn.Module, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors by all names under which a module has them.

    Tied tensors have several names; a module that is used several times has one.

    `given` has other tensors by the names that the root's own have.
    """
    own = (*root.named_parameters(), *root.named_buffers())
    first = {id(tensor): name for name, tensor in own}
    return {
        f"{prefix}.{name}": given[first[id(tensor)]]
        for prefix, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if id(tensor) in first
    }


@dataclass(frozen=True)
class StepParts:
    """The tensors of a step, in the order in which its graph takes them.

    Attributes:
        parameters: By name, shared ones once.
        buffers: By name, shared ones once.
        state: The optimizer's tensors, by group, parameter and key; empty if the update
            is not captured.
        scale: The scaler's factor, and its step count since the factor changed.
        rates: The learning rate of each group, a number or a tensor; zero if the
            optimizer has none.
        floats: Other numbers that are inputs of the graph.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    state: Mapping[tuple[int, int, str], torch.Tensor]
    scale: tuple[torch.Tensor, ...]
    rates: tuple[Any, ...]
    floats: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        settings: StepSettings = PLAIN,
    ) -> "StepParts":
        """Return the current tensors; create the optimizer's state if it is missing.

        Raises:
            UnsupportedError: The model is wrapped.
        """
        root = root_of(model, loss_fn)
        if settings.recorded:
            make_state(optimizer, set(map(id, root.parameters())))
        state = {
            (i, j, key): value
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            for key, value in optimizer.state.get(parameter, {}).items()
            if settings.recorded and isinstance(value, torch.Tensor)
        }
        return cls(
            dict(root.named_parameters()),
            dict(root.named_buffers()),
            state,
            _scale(settings, _device_of(root)),
            tuple(group.get("lr", 0.0) for group in optimizer.param_groups),
            tuple(x for read in settings.floats for x in floats_in(read.now())),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, detached; numbers become tensors."""
        groups = (self.parameters.values(), self.buffers.values(), self.state.values())
        held = [local_of(t).detach() for group in (*groups, self.scale) for t in group]
        return [*held, *map(as_tensor, (*self.rates, *self.floats))]

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return [
            *self.parameters,
            *self.buffers,
            *(f"state.{i}.{j}.{key}" for i, j, key in self.state),
            *(f"scale.{i}" for i in range(len(self.scale))),
            *(f"rate.{i}" for i in range(len(self.rates))),
            *(f"float.{i}" for i in range(len(self.floats))),
        ]


def _device_of(root: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next((p.device for p in root.parameters()), torch.device("cpu"))


def _scale(settings: StepSettings, device: torch.device) -> tuple[torch.Tensor, ...]:
    scaler: Any = settings.scaler
    if not settings.scales:
        return ()
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return scaler._scale, scaler._growth_tracker


def as_tensor(rate: Any) -> torch.Tensor:
    """Return a learning rate as a tensor."""
    if isinstance(rate, torch.Tensor):
        return rate
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


_IN_ORDER = (
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)
"""Modules that iterate over their children or parameters."""


class LiveParts:
    """Looks up the tensors of a step, and lists the state that this relies on.

    Attributes:
        parts: The tensors at the time of creation.
        reads: The modules, parameters and groups of parameters, and the optimizer's
            hyperparameters if its update is captured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
        settings: StepSettings,
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self.parts = StepParts.of(model, optimizer, loss_fn, settings)
        root = root_of(model, loss_fn)
        self._device = _device_of(root)
        self.reads: list[Read] = []
        for name, module in root.named_modules():
            if module is not root:
                self._read_module(module, name.partition(".")[2] or "the model")
        self._read_optimizer()
        if (scaler := settings.scaler) is not None:
            for key in ("_enabled", "_growth_factor", "_backoff_factor"):
                self._note(Kind.ENTRY, vars(scaler), key, f"the scaler's {key}")
            self._note(
                Kind.ENTRY, vars(scaler), "_growth_interval", "the scaler's interval"
            )
        self._numbers: dict[int, float] = {}
        self._held: dict[int, torch.Tensor] = {}
        modules = dict(root.named_modules())
        places = [
            (vars(modules[name.rpartition(".")[0]])[kind], name.rpartition(".")[2])
            for kind in ("_parameters", "_buffers")
            for name in getattr(self.parts, kind[1:])
        ]
        self._holders = [holder for holder, _ in places]
        self._keys = [key for _, key in places]
        self._entries: dict[tuple[int, int], list[str]] = {}
        for i, j, key in self.parts.state:
            self._entries.setdefault((i, j), []).append(key)
        self._is_sharded = bool(groups_of(root))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of now, in the order of the parts.

        Raises:
            LookupError: A tensor does not exist any more.
        """
        groups = self._optimizer.param_groups
        numbers = [*(group.get("lr", 0.0) for group in groups)]
        for read in self._settings.floats:
            now = floats_in(read.now())
            if len(now) != len(floats_in(read.value)):
                raise KeyError(read.label)
            numbers += now
        rates = [self._as_tensor(i, number) for i, number in enumerate(numbers)]
        tensors = [*map(operator.getitem, self._holders, self._keys)]
        for (i, j), keys in self._entries.items():
            entry = self._optimizer.state[groups[i]["params"][j]]
            tensors += [entry[key] for key in keys]
        if self._is_sharded:
            tensors = [*map(local_of, tensors)]
        return [*tensors, *_scale(self._settings, self._device), *rates]

    def _read_module(self, module: torch.nn.Module, name: str) -> None:
        held = vars(module)
        for kind in ("_modules", "_parameters", "_buffers"):
            label = f"{kind[1:]} of {name}"
            self._note(Kind.ENTRY, held, kind, label)
            self._note(Kind.SIZE, held[kind], None, f"the number of {label}")
            if isinstance(module, _IN_ORDER) and kind != "_buffers":
                self._note(Kind.CONTENTS, held[kind], None, f"the order of {label}")
            for key, value in held[kind].items():
                # Buffers that are tensors may be replaced: they are looked up.
                if kind != "_buffers" or value is None:
                    self._note(Kind.ENTRY, held[kind], key, f"{key!r} of {label}")

    def _read_optimizer(self) -> None:
        held, recorded = vars(self._optimizer), self._settings.recorded
        floats = {(id(read.holder), read.key) for read in self._settings.floats}
        groups = self._optimizer.param_groups
        self._note(Kind.ENTRY, held, "param_groups", "the optimizer's groups")
        self._note(Kind.CONTENTS, groups, None, "the optimizer's groups")
        if recorded:  # the first step of an unknown optimizer creates state
            self._note(Kind.ENTRY, held, "state", "the optimizer's state")
            self._note(Kind.SIZE, held["state"], None, "the optimizer's state")
        for i, group in enumerate(groups):
            self._note(Kind.SIZE, group, None, f"the number of settings of group {i}")
            for key, value in group.items():
                label = f"{key!r} of the optimizer's group {i}"
                if (id(group), key) in floats:
                    continue
                if key == "lr" and recorded:
                    what = f"whether {label} is a float"
                    self._note(Kind.ASKED, group, has_plain_rate, what)
                if key == "params" or (recorded and key != "lr"):
                    self._note(Kind.ENTRY, group, key, label)
                if isinstance(value, list) and (key == "params" or recorded):
                    self._note(Kind.CONTENTS, value, None, label)
            for parameter in group["params"] if recorded else ():
                self._read_state(parameter, i)

    def _read_state(self, parameter: torch.Tensor, group: int) -> None:
        state = self._optimizer.state.get(parameter)
        if state is None:
            return
        label = f"the optimizer's state in group {group}"
        self._note(Kind.SIZE, state, None, label)
        if not state:  # another dict may take the place of an empty one
            self._note(Kind.ENTRY, self._optimizer.state, parameter, label)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                self._note(Kind.ENTRY, state, key, f"{key!r} of {label}")

    def _note(self, kind: Kind, holder: Any, key: Any, label: str) -> None:
        self.reads.append(Read.of(kind, holder, key, label))

    def _as_tensor(self, place: int, number: Any) -> torch.Tensor:
        """Return a number in a tensor that stays while the number does."""
        if isinstance(number, torch.Tensor):
            return number
        if self._numbers.get(place) != number:
            self._numbers[place] = number
            self._held[place] = as_tensor(number)
        return self._held[place]
