"""Records every piece of Python state that a training step reads while it is captured.

A captured step runs no Python again, so it is valid only for the state that its capture
read. `ReadRecorder` notes that state as it is read, `guards.py` turns the notes into a
check that runs before every later step. Six rules make the notes complete:

1. *Objects.* While a capture runs, `nn.Module`, `Optimizer` and every Python class of
   which an object is reached have a `__getattribute__` that notes which attribute was
   read and what it was, and a `__setattr__` that notes what the step wrote.
2. *Functions.* A user's function that is reached counts as one that runs: the globals
   that its code names, its free variables, defaults and attributes are noted, and
   those of every function that these lead to. Containers are noted with what is in
   them. Where that leads to opaque state, the step is captured again and calls are
   watched, which takes twice the time: only functions that run are noted then. The
   others decide nothing, as a step has to read other state to call them.
3. *Opaque state.* An object of C whose state cannot be looked into (`itertools.count`,
   a generator) ends the capture before the step can use it.
4. *Effects.* What the step changed is put back when the capture is over. Attributes
   that it only writes are written again after every run. If it changes what it also
   reads, as a counter does, the capture is valid for one run only (`Reads.transient`).
5. *Caches.* A function with a cache that does not have a result yet is computed outside
   of the capture, once, as in eager mode. Its result is a constant of the step, which
   is valid while the cache holds the same results.
6. *Files and processes.* Python announces by audit events what a step is about to ask
   of the operating system. A capture that reads is valid for one run only, one that
   would change something ends before it does. Other functions that ask the system are
   known by tables.

Objects that are made within the step are the step's own and are not noted. Tensors are
not compared by value: parameters, buffers and batches are inputs of the graph, and any
other tensor is a constant of it that is read whenever the step runs.
"""

import abc
import builtins
import collections
import contextvars
import copyreg
import datetime
import decimal
import dis
import enum
import functools
import gc
import importlib.util
import inspect
import logging
import operator
import os
import pathlib
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.python_state import (
    CONTAINERS,
    MISSING,
    Kind,
    Missing,
    Read,
    cached_in,
    contents_of,
    dict_of_class,
    is_alike,
    is_same,
    set_random_state,
    shown,
)
from mucudnn.torch.source_lines import (
    is_library_file,
    is_torch_file,
    line_now,
    line_of_function,
    torch_packages,
)


class UnsoundCaptureError(UnsupportedError):
    """A later step may differ from the captured one in a way that nothing can check."""


_STILL = (
    type(None), int, float, complex, str, bytes, type(...), type(NotImplemented),
    slice, range, enum.Enum, re.Pattern, datetime.date, datetime.time,
    datetime.timedelta, datetime.tzinfo, decimal.Decimal, np.dtype, np.generic,
    operator.attrgetter, operator.itemgetter, operator.methodcaller, np.ufunc, super,
    type(np.mean), torch.dtype, torch.device, torch.layout, torch.memory_format,
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.GenericAlias,
    types.ClassMethodDescriptorType, types.UnionType,
    collections._tuplegetter,  # type: ignore[attr-defined]  # of a named tuple
    types.FrameType, types.TracebackType, type(threading.Lock()),
    type(threading.RLock()), logging.Handler,
)  # fmt: skip
"""Types whose objects do not change, or whose changes cannot influence a result."""

_REACHES_UNSEEN = frozenset({
    "__closure__", "__globals__", "getclosurevars", "setprofile",
    "submit", "apply_async", "starmap", "run_in_executor",
})  # fmt: skip
"""Names by which code reads functions that it does not call, or has others call them
in a thread that exists already: all functions count as running then."""

_UNSEEN_MODULES = (
    "torch", "pybind11_builtins", "importlib", "_frozen_importlib", "typing", "mucudnn",
    "concurrent", "inspect", "threading", "weakref",
)  # fmt: skip
"""Packages whose objects are not looked into: their state decides no result."""

_UNSEEN_OF_TORCH = re.compile(
    r"torch(\..*)?\._|torch\.(fx|library|jit|cuda(?!\.amp)|overrides|autograd|export|"
    r"compiler|profiler|distributed|backends|futures|package|ops)\b"
)
"""Modules of PyTorch whose objects are not looked into: tracing, graphs, kernels."""

_TELLS_TIME = frozenset({"time", "secrets", "uuid", "select", "socket"})
"""Modules whose functions return something else at every call."""

_ASKS_PATHS = frozenset(
    {"exists", "getmtime", "getsize", "isdir", "isfile", "islink", "lexists"}
    | {"abspath", "expanduser", "expandvars", "realpath"}
)
"""Functions of `os.path` that read what no note shows."""

_ASKS_FILES = frozenset(
    {"cwd", "exists", "is_dir", "is_file", "is_symlink", "lstat", "resolve", "stat"}
    | {"absolute", "expanduser", "home"}
)
"""Methods of `pathlib.Path` that read what no note shows."""

_ASKS_OUTSIDE: Mapping[str, frozenset[str]] = {
    "os": frozenset(
        {"access", "getcwd", "lstat", "read", "readlink", "stat", "urandom"}
        | {"getloadavg", "sched_getaffinity", "times", "umask"}
    ),
    os.path.__name__: _ASKS_PATHS,
    "pathlib": _ASKS_FILES,
    "datetime": frozenset({"now", "today", "utcnow"}),
    "decimal": frozenset({"getcontext"}),
    "gc": frozenset(
        {"get_count", "get_objects", "get_referrers", "get_threshold", "isenabled"}
    ),
    "importlib": frozenset({"import_module"}),
    "inspect": frozenset({"currentframe", "stack"}),
    "linecache": frozenset({"getline", "getlines"}),
    "locale": frozenset({"getlocale", "localeconv", "setlocale"}),
    "numpy.random": frozenset({"RandomState", "SeedSequence", "default_rng"}),
    "random": frozenset({"Random", "SystemRandom"}),
    "resource": frozenset({"getrlimit", "getrusage"}),
    "shutil": frozenset({"disk_usage", "get_terminal_size"}),
    "signal": frozenset({"getsignal"}),
    "sys": frozenset(
        {"_getframe", "get_int_max_str_digits", "getrecursionlimit"}
        | {"getrefcount", "getswitchinterval", "gettrace"}
    ),
    "tempfile": frozenset({"gettempdir"}),
    "threading": frozenset({"active_count", "current_thread", "get_ident"}),
    "torch": frozenset({"load"}),
    "traceback": frozenset({"extract_stack", "format_stack"}),
    "tracemalloc": frozenset({"get_traced_memory", "is_tracing"}),
    "weakref": frozenset({"getweakrefcount", "getweakrefs"}),
}
"""Functions of libraries that read what neither a note nor the interpreter's audit
events show, by module."""

_AUDITED = (
    "builtins.input", "fcntl.", "ftplib.", "glob.", "http.", "open", "os.", "shutil.",
    "smtplib.", "socket.", "sqlite3.", "subprocess.", "syslog.", "urllib.",
)  # fmt: skip
"""Beginnings of Python's audit events of what is read or changed outside of the
process."""

_ONLY_READS = frozenset(
    {"glob.glob", "os.getxattr", "os.listdir", "os.listxattr", "os.scandir"}
)
"""Those of these events after which nothing outside has changed."""

_BESIDE_STEP = frozenset(
    {"_frozen_importlib", "_frozen_importlib_external", "importlib", "linecache"}
    | {"importlib._bootstrap", "importlib._bootstrap_external", "logging", "traceback"}
    | {"warnings"}
)
"""Modules that look for files to show or import source code, or that write logs."""

_LOOKS_ANYWHERE = (globals, locals, vars, eval, exec, __import__)
"""Builtins that reach state which no note shows."""

_OUTSIDE: Mapping[int, str] = {
    **{id(function): function.__name__ for function in _LOOKS_ANYWHERE},
    **{
        id(function): name
        for module, names in _ASKS_OUTSIDE.items()
        for name, function in vars(importlib.import_module(module)).items()
        if name in names and callable(function)
    },
}
"""Names of these functions and classes by identity: a step may have them under other
names, as after `from os.path import exists`."""

_LOAD = torch.load.__code__
"""The code of `torch.load`, which opens a file in C++."""

_ASKS_UNSEEN = frozenset({"__subclasses__", "locked"})
"""Names of methods that read what no note shows."""

_STRUCTURE = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
)
"""Attributes of modules that the step's tensors are looked up in (`parts.py`)."""

_OPTIMIZER_PARTS = frozenset({"param_groups", "state", "_opt_called"})

_MOST_ELEMENTS = 1 << 16
_MOST_ARRAY_BYTES = 1 << 16

_ASKING = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.__bool__,
        torch.Tensor.__complex__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
        torch.Tensor.__repr__,
    }
)


@dataclass(frozen=True)
class Effect:
    """State that the step has changed.

    Attributes:
        place: Where, with the value before.
        after: The value that the step gave it.
    """

    place: Read
    after: Any


@dataclass(frozen=True)
class Reads:
    """Python state that a capture has read and changed.

    Attributes:
        reads: State that later steps must find as it was.
        effects: What every run of the captured step has to change.
        constants: Tensors of the graph that are no inputs of it.
        transient: Why the capture is valid for one run only; empty if it is not.
        writes: Where the step prints or logs; empty if it does not.
        repeats: What the function of a checkpoint changes; empty if nothing.
    """

    reads: Sequence[Read]
    effects: Sequence[Effect] = ()
    constants: Sequence[torch.Tensor] = ()
    transient: str = ""
    writes: str = ""
    repeats: str = ""


class ReadRecorder:
    """Notes what a step reads and writes while it is captured; put back at the end.

    Use it as a context manager around one run of the step. Only one recorder may be
    active in a process, because classes are shared: hold `exclusive_capture()`.

    Args:
        modules: All modules of the step.
        roots: Other objects that the step begins from, by what they are called.
        parameters: Those of the modules, by name.
        inputs: Tensors that are inputs of the graph.
        floats: Python numbers that are inputs of the graph.
        watches_calls: Whether only functions that run are noted.

    Attributes:
        may_be_unread: Whether functions that may not run decide that the step cannot be
            captured, or for one run only.
        writes: Where the step prints or logs; empty if it does not.
        repeats: What the function of a checkpoint changes; empty if nothing.
        has_numbers: Whether the step has numbers that are symbols while it is captured.
        is_computing: Whether a function with a cache is computed on real tensors.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        roots: Mapping[str, Any],
        parameters: Mapping[str, torch.Tensor],
        inputs: Iterable[torch.Tensor],
        floats: Iterable[Read] = (),
        *,
        watches_calls: bool = False,
    ) -> None:
        self._floats = {_key_of(read.kind, read.holder, read.key) for read in floats}
        self._modules = list(modules)
        self._roots = roots
        self._parameters = parameters
        self._inputs = {id(tensor) for tensor in inputs}
        self._reads: dict[Any, Read] = {}
        self._written: dict[Any, Read] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()
        self._own = {id(module) for module in self._modules}
        self._seen: set[Any] = set()
        self._static: set[Any] = set()
        self._lent: set[Any] = set()
        self._stored: set[int] = set()  # containers from before, by identity
        self._alive: list[Any] = []  # ids are compared: nothing noted may be freed
        self._classes: dict[type, dict[str, Any]] = {}
        self._namespaces: list[types.ModuleType] = []
        self._reasons: list[str] = []
        self._opaque = self._held = self._compares = self._asks_type = ""
        self.has_numbers = bool(self._floats)
        self.in_update = False  # of the optimizer, whose groups and state are lent
        self._users: dict[type, frozenset[str]] = {}  # classes, and their attributes
        self._paused = True
        self._foreign: set[threading.Thread] = set()  # of others, and those they start
        self._structure: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        self._imports: dict[str, str] = {}  # modules that are not there yet
        self._ran: set[int] = set()  # codes, by identity
        self._within: set[int] = set()  # codes within those of noted functions
        self._waiting: dict[int, list[types.FunctionType]] = {}  # functions by code
        # Only one can watch calls: beside a profiler all functions count as running.
        profiled = sys.getprofile() is not None or threading.getprofile() is not None
        self._all_run = not watches_calls or profiled
        self.may_be_unread = False
        self.writes = self.repeats = ""
        self.is_computing = False
        self._cached: dict[types.FunctionType, types.CodeType] = {}

    def __enter__(self) -> "ReadRecorder":
        self._structure = [
            (vars(m)[kind], dict(vars(m)[kind]), type(m).__name__)
            for m in self._modules
            for kind in ("_parameters", "_buffers", "_modules")
        ]
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise UnsoundCaptureError(
                "the step was called within saved-tensor hooks, such as save_on_cpu, "
                "which do not apply to planned steps; call it outside"
            )
        # Autograd may call hooks in threads of its own, which Python did not start:
        # these are dummies.
        own = threading.current_thread()
        others = set(threading.enumerate()) - {own}
        self._foreign = {t for t in others if not isinstance(t, threading._DummyThread)}
        self._start = start = threading.Thread.start

        def noting_start(thread: threading.Thread) -> None:
            if threading.current_thread() in self._foreign:
                self._foreign.add(thread)
            start(thread)

        threading.Thread.start = noting_start  # type: ignore[assignment,method-assign]
        for cls in (nn.Module, torch.optim.Optimizer):
            self._watch_class(cls)
        self._note(Kind.GENERATOR, random, set_random_state, "the generator of random")
        label = "the generator of numpy.random"
        self._note(Kind.GENERATOR, np.random, set_random_state, label)
        label = "parametrize.cached()"
        self._note(Kind.ENTRY, vars(parametrize), "_cache_enabled", label)
        try:
            for module in self._modules:
                self._take(module, f"a {type(module).__name__}")
            for name, root in self._roots.items():
                self._take(root, name)
            for name, hooks in _hooks_of_all().items():
                self._contents(hooks, name)
            for name, parameter in self._parameters.items():
                self._take_parameter(parameter, name)
        except BaseException:
            self.__exit__()
            raise
        self._paused = False
        _active_recorders().append(self)
        copyreg.__newobj__ = self._noting_copies(copyreg.__newobj__)  # type: ignore[attr-defined]
        if not self._all_run:
            threading.setprofile(self._watch_calls)
            sys.setprofile(self._watch_calls)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.getprofile() == self._watch_calls:
            sys.setprofile(None)  # which an error within it has done already
            threading.setprofile(None)
        self._paused = True
        _active_recorders().clear()
        threading.Thread.start = self._start  # type: ignore[method-assign]
        for function, code in self._cached.items():
            function.__code__ = code
        made = copyreg.__newobj__  # type: ignore[attr-defined]
        copyreg.__newobj__ = getattr(made, "__wrapped__", made)  # type: ignore[attr-defined]
        for module in self._namespaces:
            module.__class__ = types.ModuleType
        for cls, own in self._classes.items():
            for name, value in own.items():
                if value is MISSING:
                    type.__delattr__(cls, name)
                else:
                    type.__setattr__(cls, name, value)
        self._classes.clear()

    # -- results

    def effects(self) -> list[Effect]:
        """Return what the step has changed so far, places it reads first."""
        self._paused = True
        for cls, names in self._users.items():
            for name in self._vars_of(cls).keys() - names:
                label = f"{cls.__name__}.{name}"
                read = Read(Kind.CLASS, cls, name, MISSING, label)
                self._reads.setdefault((id(cls), name), read)
        places = [
            read
            for at, read in (*self._reads.items(), *self._written.items())
            if read.kind not in (Kind.ASKED, Kind.CACHE) and at not in self._lent
        ]
        found = [Effect(place, place.now()) for place in places]
        return [e for e in found if not is_same(e.after, e.place.value)]

    def changes(self) -> dict[Any, tuple[str, Any]]:
        """Return what the step reads and has changed so far: labels and values."""
        before, read = self._paused, set(map(id, self._reads.values()))
        changed = [e for e in self.effects() if id(e.place) in read]
        self._paused = before
        return {id(e.place): (e.place.label, e.after) for e in changed}

    def is_kept(self, value: Any) -> bool:
        """Return whether a container that the step stores was there before.

        It is stored itself, not a copy, so that no other may be in its place later.
        What is in it is a place of its own.
        """
        read = self._reads.get(_key_of(Kind.CONTENTS, value, None))
        if read is None or any(map(_is_traced, read.value)):
            return False
        self._stored.add(id(value))
        return True

    def finish(self, effects: Sequence[Effect]) -> Reads:
        """Put everything back that the step has changed; return what was noted.

        Args:
            effects: Of this step, their tensors replaced by what stands for them.

        Raises:
            UnsoundCaptureError: The step uses state that cannot be looked into.
        """
        self.put_back()
        if self._held and self._compares and not self._opaque:
            self.may_be_unread = True
            self._opaque = (
                f"the step may compare {self._held}, a tensor that it trains or is "
                f"given, by `is`{self._compares}, which a capture cannot; compare "
                "names, or use `in` with a set"
            )
        if self.has_numbers and self._asks_type and not self._opaque:
            self.may_be_unread = True
            self._opaque = _TYPE.format(self._asks_type)
        if self._opaque:
            raise UnsoundCaptureError(self._opaque)
        read = set(map(id, self._reads.values()))
        reasons = [why for name, why in self._imports.items() if name in sys.modules]
        reasons += [
            _reason(e)
            for e in effects
            # Another list of the same values decides nothing.
            if id(e.place) in read and not is_alike(e.after, e.place.value)
        ]
        # A generator that was not drawn from decides nothing.
        reads = [r for r in self._reads.values() if r.kind is not Kind.GENERATOR]
        reads = [
            replace(r, value=r.now()) if r.kind is Kind.CACHE else r for r in reads
        ]
        for cls in self._users:
            held = dict_of_class(cls)
            label = f"the number of attributes of class {cls.__name__}"
            reads.append(Read.of(Kind.SIZE, held, None, label))
            for name in _NOTING & held.keys():
                label = f"{cls.__name__}.{name}"
                reads.append(Read.of(Kind.CLASS, cls, name, label))
        label = "the number of attributes of torch.Tensor"
        reads.append(Read.of(Kind.SIZE, vars(torch.Tensor), None, label))
        reads = [
            replace(r, is_exact=True)
            if not self._stored.isdisjoint(map(id, (r.value, *r.elements)))
            else r
            for r in reads
        ]
        constants = tuple(self._constants.values())
        first = next(iter((*self._reasons, *reasons)), "")
        said = first, self.writes, self.repeats
        return Reads(tuple(reads), tuple(effects), constants, *said)

    def put_back(self, *, with_plain: bool = True) -> None:
        """Give all noted state the value that it had before the step.

        Unless `with_plain`, state that holds no tensor stays as the step left it.
        """
        for effect in self.effects():
            leaves = pytree.tree_leaves(effect.after)
            if with_plain or any(isinstance(v, torch.Tensor) for v in leaves):
                effect.place.put(effect.place.value)
        for read in self._reads.values():
            # Caches of functions in Python were filled outside of the capture.
            is_cache = read.kind is Kind.CACHE
            if is_cache and read.holder.__wrapped__ not in self._cached:
                if read.now() == read.value:
                    continue
                read.holder.cache_clear()
                self._opaque = _CACHE.format(read.label, "is not in Python")
        for held, before, kind in self._structure:
            changed = held.keys() ^ before.keys()
            changed |= {
                k for k in held.keys() & before.keys() if held[k] is not before[k]
            }
            if changed and not self._opaque:
                self._opaque = (
                    f"the step creates or removes {min(changed)!r} of a {kind}; do so "
                    "before the first step"
                )
            held.clear()
            held.update(before)

    def release(self) -> None:
        """Drop what was noted: tracers live until they are collected."""
        for noted in (self._alive, self._reads, self._written, self._constants):
            noted.clear()

    def lend(self, holder: dict[str, Any], key: str, label: str) -> None:
        """Note an entry that the capture itself is about to replace for a while."""
        self._note(Kind.ENTRY, holder, key, label)
        self._lent.add((id(holder), key))

    def asked(self, function: Any, tensor: torch.Tensor, value: Any) -> None:
        """Note that Python asked a tensor, which is no input, for its value."""
        if function in _ASKING and id(tensor) not in self._inputs:
            key = id(tensor), function
            label = f"the value of a tensor{line_now()}"
            read = Read(Kind.ASKED, tensor, function, value, label)
            self._reads.setdefault(key, read)

    def lasts_one_run(self, reason: str) -> None:
        """Note why the capture is valid for one run only."""
        self._reasons.append(reason)

    def check_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the update of a user's optimizer that asks for the type of a rate."""
        if self._asks_type and not _is_library(type(optimizer)):
            raise UnsoundCaptureError(_TYPE.format(self._asks_type))

    def take_operation(self, name: str) -> None:
        """Note what the gradient of an operation, such as "my::op", may read."""
        self._take(torch._library.custom_ops.OPDEFS.get(name), name)

    def take_logger(self, logger: logging.Logger) -> None:
        """Note what decides whether a logger writes, and to which handlers."""
        self._note(Kind.ENTRY, vars(logger.manager), "disable", "logging.disable")
        for name in ("level", "disabled", "parent", "propagate"):
            label = f"{name!r} of logger {logger.name!r}"
            self._take(self._note(Kind.ENTRY, vars(logger), name, label), label)
        label = f"the handlers of logger {logger.name!r}"
        self._note(Kind.CONTENTS, logger.handlers, None, label)

    def check_effects(self, effects: Sequence[Effect]) -> None:
        """Refuse effects that cannot be had again after a run of the captured step.

        Raises:
            UnsoundCaptureError: The step keeps an object that it has made, which may
                hold tensors without data, or a number that only a run has.
        """
        for effect in effects:
            for leaf in pytree.tree_leaves(effect.after):
                plain = isinstance(leaf, (*_STILL, torch.Tensor, type, Missing))
                if not plain and id(leaf) not in self._seen:
                    name = type(leaf).__name__.removeprefix("Sym")
                    raise UnsoundCaptureError(
                        f"the step stores a new {name} in {effect.place.label}; only "
                        "tensors, plain values and containers of them can be stored "
                        "between steps, and no number that item() reads from a tensor"
                    )

    def note_event(
        self, event: str, args: tuple[Any, ...], frame: types.FrameType
    ) -> None:
        """Note an audit event of the interpreter, if a function of the step caused it.

        Args:
            event: Its name, such as "open".
            args: What Python passes with it.
            frame: The function that caused it.

        Raises:
            UnsoundCaptureError: It announces a change outside of the process, which can
                neither be undone after a capture nor be made by later steps.
        """
        if self._paused or self._is_elsewhere() or not _is_of_step(frame):
            return
        event = event.partition("/")[0]
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event in _ONLY_READS or (event == "open" and not args[2] & writes):
            self.lasts_one_run(f"it calls {event}(){line_now()}")
            return
        what = f"opens {args[0]!r} to write" if event == "open" else f"calls {event}()"
        self._opaque = (
            f"the step {what}{line_now()}, which planned steps cannot repeat; do so "
            "outside of the step"
        )
        raise UnsoundCaptureError(self._opaque)

    # -- objects

    def _is_elsewhere(self) -> bool:
        """Return whether another thread than those of the step is running."""
        return threading.current_thread() in self._foreign

    def _attribute(self, obj: Any, name: str) -> None:
        """Note an attribute before it is read."""
        if self._paused or self._is_elsewhere():
            return
        if id(obj) in self._made:
            return
        self._paused = True
        try:
            # Whoever takes all attributes at once, as `copy` does, reads all of them.
            if name in _COPYING:
                self._contents(_dict_of(obj), f"{type(obj).__name__}.__dict__")
                for base in type(obj).__mro__:
                    for slot, value in list(vars(base).items()):
                        if isinstance(value, types.MemberDescriptorType):
                            self._note_attribute(obj, slot)
            elif name == "__dict__":
                if not is_library_file(sys._getframe(2).f_code.co_filename):
                    self._contents(_dict_of(obj), f"{type(obj).__name__}.__dict__")
            elif name[:2] != "__" or name == "__call__":
                self._note_attribute(obj, name)
        finally:
            self._paused = False

    def _note_attribute(self, obj: Any, name: str) -> None:
        held = _dict_of(obj)
        key = id(obj if held is None else held), name
        if key in self._seen or key in self._written:
            return
        self._seen.add(key)
        self._alive += [obj, held]
        self._take_class(type(obj))
        label = f"{type(obj).__name__}.{name}"
        if isinstance(obj, pathlib.Path) and name in _ASKS_FILES:
            self._may_run_once(f"it calls {name}(){line_now()}")
        if held is not None:
            if self._is_part(obj, held, name):
                return
            if _is_machinery(obj, name):
                return
            self._note(Kind.TYPE, obj, None, f"the class of a {type(obj).__name__}")
            value = self._note(Kind.ENTRY, held, name, label)
            if value is not MISSING:
                self._take(value, label)
                return
        for base in type(obj).__mro__:
            value = self._vars_of(base).get(name, MISSING)
            if value is not MISSING and base is not object:
                self._note(Kind.CLASS, base, name, f"{base.__name__}.{name}")
                if isinstance(value, types.MemberDescriptorType):
                    value = self._note(Kind.SLOT, obj, name, label)
                self._take(value, f"{base.__name__}.{name}")
            if value is not MISSING:
                break

    def _is_part(self, obj: Any, held: Any, name: str) -> bool:
        """Return whether an attribute is checked with the tensors of the step."""
        if isinstance(obj, nn.Module) and held is not None:
            if isinstance(obj, nn.RNNBase) and name.startswith("_flat_weight"):
                return True  # lists of its parameters: here, of those that are lent
            parts = [held[kind] for kind in _STRUCTURE if kind in held]
            return name in _STRUCTURE or any(name in part for part in parts)
        if not isinstance(obj, torch.optim.Optimizer) or name not in _OPTIMIZER_PARTS:
            return False
        if not self.in_update and name == "state":
            self._refuse("the passes read the optimizer's state")
        for group in held[name] if not self.in_update and name != "_opt_called" else ():
            for key in group:
                label = f"{key!r} of a group of the optimizer"
                self._take(self._note(Kind.ENTRY, group, key, label), label)
        return True

    def _write(self, obj: Any, name: str) -> None:
        """Note an attribute before it is written."""
        if self._paused or self._is_elsewhere():
            return
        held = _dict_of(obj)
        key = id(obj if held is None else held), name
        if id(obj) not in self._seen or key in self._written or key in self._reads:
            return  # an object of the step's own, or noted
        for base in type(obj).__mro__:
            if (descriptor := self._vars_of(base).get(name)) is not None:
                self._take(descriptor, f"{base.__name__}.{name}")
                break
        if self._is_part(obj, held, name):
            return
        where = (Kind.SLOT, obj) if held is None else (Kind.ENTRY, held)
        self._written[key] = Read.of(*where, name, f"{type(obj).__name__}.{name}")
        self._alive += [obj, held]

    def _watch_class(self, cls: type) -> None:
        """Have a class note reads and writes of its objects' attributes."""
        if _is_unseen(cls) and not issubclass(cls, nn.Module | torch.optim.Optimizer):
            return
        for base in cls.__mro__:
            if base in self._classes:
                return  # inherits the noting methods
            if "__getattribute__" in vars(base):
                break
        read, write = self._attribute, self._write
        made, alive = self._made, self._alive
        get: Any = cls.__getattribute__
        put: Any = cls.__setattr__
        delete: Any = cls.__delattr__
        init: Any = vars(cls).get("__init__", getattr(cls, "__init__"))  # noqa: B009

        def noting_get(self: Any, name: str) -> Any:
            read(self, name)
            return get(self, name)

        def noting_set(self: Any, name: str, value: Any) -> None:
            write(self, name)
            put(self, name, value)

        def noting_delete(self: Any, name: str) -> None:
            write(self, name)
            delete(self, name)

        def noting_init(self: Any, *args: Any, **kwargs: Any) -> None:
            made.add(id(self))
            alive.append(self)
            # object's own would refuse arguments that are meant for `__new__`.
            if init is not object.__init__:
                init(self, *args, **kwargs)

        noting: dict[str, Any] = {
            "__getattribute__": noting_get,
            "__setattr__": noting_set,
            "__delattr__": noting_delete,
            "__init__": noting_init,
        }
        own = {name: vars(cls).get(name, MISSING) for name in noting}
        try:
            for name, function in noting.items():
                type.__setattr__(cls, name, function)  # whatever its metaclass says
        except TypeError:
            return  # a class of C: its objects are looked at by `_take`
        self._classes[cls] = own

    def _noting_copies(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes an object for `copy`, which does not call `__init__`."""

        @functools.wraps(make)
        def noting(cls: type, *args: Any) -> Any:
            found = make(cls, *args)
            self._made.add(id(found))
            self._alive.append(found)
            return found

        return noting

    def _vars_of(self, cls: type) -> dict[str, Any]:
        """Return a class's own attributes, without the methods that note reads."""
        if (own := self._classes.get(cls)) is None:
            return dict(vars(cls))
        both = {**vars(cls), **own}
        return {name: value for name, value in both.items() if value is not MISSING}

    def _take_class(self, cls: type) -> None:
        """Note everything in a class: `super()`, operators and others look it up."""
        if ("class", id(cls)) in self._seen:
            return
        self._seen.add(("class", id(cls)))
        if type(cls) is not type:
            self._take_class(type(cls))
        for base in cls.__mro__:
            if base in self._users or _is_library(base) or _is_unseen(base):
                continue
            held = self._vars_of(base)
            self._users[base] = frozenset(held)
            for slot in ("__name__", "__bases__"):
                self._note(Kind.SLOT, base, slot, f"{slot} of class {base.__name__}")
            if isinstance(base, abc.ABCMeta):  # as `register` changes isinstance()
                label = "the classes that are registered as others (abc)"
                asked = operator.methodcaller("get_cache_token")
                read = Read.of(Kind.ASKED, abc, asked, label)
                self._reads.setdefault((id(abc), "registered"), read)
            for name, value in held.items():
                label = f"{base.__name__}.{name}"
                if name not in _NOTING:
                    self._note(Kind.CLASS, base, name, label)
                dunder = name[:2] == "__"  # operators call these, past any note
                runs = isinstance(value, types.FunctionType)
                if runs if dunder else not isinstance(value, _CALLED):
                    self._take(value, label)

    def _take_parameter(self, parameter: torch.Tensor, name: str) -> None:
        """Note what a parameter holds beside its values."""
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            label = f"hooks of parameter {name!r}"
            value = self._note(Kind.SLOT, parameter, hooks, label)
            if value is not None:
                self._contents(value, label)
        self._contents(parameter.__dict__, f"an attribute of parameter {name!r}")

    # -- values and functions

    def _take(self, value: Any, label: str) -> None:
        """Note what a value consists of that the step has reached."""
        kind: Any = type(value)
        if kind in weakref.ProxyTypes:
            value = weakref.ref(value.__init__.__self__)
            kind = type(value)
        if kind is object or (_is_still(kind) and isinstance(value, _STILL)):
            return
        if isinstance(value, torch.Tensor):
            if id(value) in self._inputs:
                self._held = self._held or label
            elif not _is_traced(value):
                self._constants[id(value)] = value
                self._contents(value.__dict__, f"an attribute of {label}")
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, (*CONTAINERS, types.MappingProxyType)):
            self._contents(value, label)
            if isinstance(value, collections.defaultdict):
                self._take(value.default_factory, label)
            if kind.__module__ in ("builtins", "collections"):
                return
            if isinstance(value, tuple) and _is_library(kind):  # as sys.version_info
                return
        if id(value) in _OUTSIDE:
            self._may_run_once(f"it uses {_OUTSIDE[id(value)]} ({label})")
        if isinstance(value, types.FunctionType):
            if value.__module__ in _TELLS_TIME:
                self._may_run_once(f"it uses {value.__module__} ({label})")
            if value is os.getenv:
                self._contents(os.environ._data, "os.environ")  # type: ignore[attr-defined]
            self._function(value)
        elif isinstance(value, staticmethod | classmethod):
            self._take(value.__func__, label)
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset, value.fdel):
                self._take(accessor, label)
        elif isinstance(value, types.MethodType):
            self._take(value.__func__, label)
            self._take(value.__self__, label)
        elif isinstance(value, types.BuiltinFunctionType):
            if not isinstance(value.__self__, types.ModuleType):
                self._take(value.__self__, label)
                if value.__name__ in _ASKS_OUTSIDE["datetime"]:
                    self._may_run_once(f"it uses {value.__name__} ({label})")
            elif (name := value.__self__.__name__) in _TELLS_TIME:
                self._may_run_once(f"it uses {name} ({label})")
        elif isinstance(value, types.MethodWrapperType):
            self._take(value.__self__, label)
        elif isinstance(value, weakref.ref):
            target = value()
            if not isinstance(target, (*_KEPT_ALIVE, types.FunctionType)):
                self._may_run_once(f"it reads {label}, a weak reference")
            self._take(target, label)
        elif isinstance(value, _WEAK_CONTAINERS):
            self._contents(vars(value)["data"], label)
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords", "__dict__"):
                self._take(self._note(Kind.SLOT, value, part, label), label)
        elif isinstance(value, types.ModuleType):
            self._watch_namespace(value)
        elif isinstance(value, type):
            self._take_class(value)
            for base in value.__mro__:  # the step may make objects of it
                if not _is_library(base) and not _is_unseen(base):
                    for method in self._vars_of(base).values():
                        if isinstance(method, _METHODS):
                            self._take(method, f"a method of {base.__name__}")
        elif isinstance(value, torch.library.CustomOpDef):
            for function in (value._backward_fn, value._setup_context_fn):
                self._take(function, label)
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.nbytes > _MOST_ARRAY_BYTES:
                self._refuse(f"{label} is a NumPy array of {value.nbytes} bytes")
            self._note(Kind.ARRAY, value, None, label)
        elif isinstance(value, logging.Logger):
            self.take_logger(value)
        elif isinstance(value, _NAMESPACES):
            self._contents(vars(value), label)
            if isinstance(value, threading.local):  # with a dict for every thread
                what = f"the thread's own {label}"
                read = Read(Kind.ASKED, value, vars, vars(value), what, is_exact=True)
                self._reads[Kind.ASKED, id(value)] = read
        elif isinstance(value, random.SystemRandom):
            self._may_run_once(f"it draws from {label}")
        elif isinstance(value, _RANDOM):
            self._note(Kind.GENERATOR, value, set_random_state, label)
        elif isinstance(value, contextvars.ContextVar):
            what = f"context variable {value.name!r}"
            self._take(self._note(Kind.CONTEXT, value, None, what), what)
        elif isinstance(value, functools._lru_cache_wrapper):
            written = isinstance(value.__wrapped__, types.FunctionType)
            if not _is_unseen(value) or not written:
                self._note(Kind.CACHE, value, None, f"the cache of {label}")
                for held in cached_in(value):
                    self._take(held, f"a result of {label}")
                self._compute_outside(value.__wrapped__, label)
        elif _is_python_class(kind):
            if isinstance(value, nn.Module) and id(value) not in self._own:
                for structure in sorted(_STRUCTURE):
                    self._contents(vars(value)[structure], label)
            if not _is_unseen(kind) or isinstance(value, nn.Module):
                self._take_class(kind)
                self._watch_class(kind)
        elif kind is torch.Generator or not _is_unseen(kind):
            self._refuse(f"{label} is a {kind.__module__}.{kind.__qualname__}")

    def _compute_outside(self, function: Any, label: str) -> None:
        """Have a function, whose results are cached, run outside of the capture."""
        if not isinstance(function, types.FunctionType) or function in self._cached:
            return
        whole = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        whole.__kwdefaults__ = function.__kwdefaults__

        def compute(args: Any, kwargs: Any) -> Any:
            if self._is_elsewhere() or self.is_computing:
                return whole(*args, **kwargs)
            return self._computed(functools.partial(whole, *args, **kwargs), label)

        self._note(Kind.SLOT, function, "__code__", f"the code of {label}")
        self._lent.add((id(function), "__code__"))
        self._cached[function] = function.__code__
        function.__code__ = _code_calling(compute, len(function.__code__.co_freevars))

    def _computed(self, function: Callable[[], Any], label: str) -> Any:
        """Return what a function computes on real tensors, as in eager mode.

        Raises:
            UnsoundCaptureError: It draws random numbers, whose order would differ, or
                it needs a tensor of the step.
        """
        before, why = self._paused, ""
        self._paused = self.is_computing = True
        try:
            with _disable_current_modes():
                states = _generator_states()
                found = function()
                if states != _generator_states():
                    why = "draws random numbers"
            if any(map(_is_traced, pytree.tree_leaves(found))):
                why = "returns a tensor of the step"
        except Exception as e:
            own = "FunctionalTensor" in str(e)
            why = "needs a tensor of the step" if own else f"cannot run outside: {e}"
            raise UnsoundCaptureError(_CACHE.format(label, why)) from e
        finally:
            self._paused, self.is_computing = before, False
        if why:
            raise UnsoundCaptureError(_CACHE.format(label, why))
        self._take(found, f"a result of {label}")
        return found

    def _may_run_once(self, reason: str) -> None:
        """Note why the capture is valid for one run, if this part of the step runs."""
        self.may_be_unread = True
        self._reasons.append(reason)

    def _refuse_comparison(self, code: types.CodeType) -> None:
        self.may_be_unread = True
        self._opaque = (
            f"the step compares the class of a tensor{line_of_function(code)}, which "
            "is another one during capture; use isinstance()"
        )
        raise UnsoundCaptureError(self._opaque)

    def _refuse(self, what: str) -> None:
        self.may_be_unread = True
        self._opaque = (
            f"{what}, whose state cannot be compared between steps{line_now()}; keep "
            "what a step needs in plain attributes or tensors, or give it as part of "
            "the batch"
        )
        raise UnsoundCaptureError(self._opaque)

    def _note(self, kind: Kind, holder: Any, key: Any, label: str) -> Any:
        """Note one piece of state; return its value."""
        at = _key_of(kind, holder, key)
        if at in self._floats:
            return Read.of(kind, holder, key, label).value
        if (read := self._reads.get(at)) is not None:
            return read.value
        if (read := self._written.get(at)) is not None:
            if kind is Kind.CELL or at in self._static:
                # Some function of the step reads it, perhaps before it is written.
                self._reads[at] = self._written.pop(at)
            return read.now()
        self._reads[at] = read = Read.of(kind, holder, key, label)
        self._alive.append(holder)
        return read.value

    def _note_written(
        self, at: Any, kind: Kind, holder: Any, key: Any, label: str
    ) -> None:
        """Note a variable that a function of the step writes and does not read."""
        if at not in self._reads and at not in self._written:
            self._written[at] = Read.of(kind, holder, key, label)
            self._static.add(at)
            self._alive.append(holder)

    def _contents(self, container: Any, label: str) -> None:
        if container is None:
            return
        if len(container) > _MOST_ELEMENTS:
            self._refuse(f"{label} has {len(container)} elements")
        elements = contents_of(container)
        if not isinstance(container, tuple | frozenset):
            self._note(Kind.CONTENTS, container, None, label)
        for element in elements:
            self._take(element, f"{label}[...]")

    def _function(self, function: types.FunctionType) -> None:
        """Note what can be read of a function without a call, and all when it runs."""
        name, code = function.__qualname__, function.__code__
        library = is_library_file(code.co_filename)
        if not library:
            self._note(Kind.SLOT, function, "__code__", f"the code of {name}")
            self._note(Kind.SLOT, function, "__doc__", f"the text of {name}")
            for slot in ("__defaults__", "__kwdefaults__"):
                self._note(Kind.SLOT, function, slot, f"a default of {name}")
            self._contents(function.__dict__, f"an attribute of {name}")
        # Functions of libraries are also reached by ways that are not noted.
        if library or self._all_run or id(code) in self._ran:
            self._runs(function)
        else:
            self._waiting.setdefault(id(code), []).append(function)

    def _watch_calls(self, frame: types.FrameType, event: str, _: object) -> None:
        """Note what a function reads before it runs (see `sys.setprofile`)."""
        code = frame.f_code
        if event != "call" or id(code) in self._ran or self.is_computing:
            return
        if _is_beside_step(frame):
            return
        self._ran.add(id(code))
        self._alive.append(code)  # so that no other code gets its identity
        if code is _LOAD:
            self._may_run_once(f"it calls load(){line_now()}")
        is_own = id(code) in self._within and not is_library_file(code.co_filename)
        if is_own and code in _names_in(code).comparing_classes:
            self._refuse_comparison(code)
        functions = self._waiting.pop(id(code), [])
        unknown = not functions and id(code) not in self._within
        if unknown and not _is_of_library(frame):
            # It was reached by a way that is not noted, such as an object of C.
            functions = [
                f
                for f in gc.get_referrers(code)
                if isinstance(f, types.FunctionType) and f.__code__ is code
            ]
            if not functions and code.co_flags & inspect.CO_OPTIMIZED:
                # `gc.freeze` hides objects from `gc.get_referrers`.
                where = line_of_function(code)
                self._may_run_once(f"it reaches {code.co_qualname}() unseen{where}")
        before, self._paused = self._paused, True
        try:
            for function in functions:
                self._runs(function)
        finally:
            self._paused = before

    def _runs(self, function: types.FunctionType) -> None:
        """Note what a function may read when it runs."""
        name, code = function.__qualname__, function.__code__
        self._within |= _codes_in(code)
        written = _names_in(code).free_stored
        for free, cell in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            what = f"free variable {free!r} of {name}"
            if free in written:
                self._note_written((Kind.CELL, id(cell)), Kind.CELL, cell, None, what)
            else:
                self._take(self._note(Kind.CELL, cell, None, what), what)
        around, names = function.__globals__, _names_in(code)
        if is_library_file(code.co_filename):
            # Functions of PyTorch by which one of its layers computes.
            for module in map(around.get, names.loaded):
                if module is torch or module is nn.functional:
                    self._namespace(module, names, "")
            return
        for default in (function.__defaults__, function.__kwdefaults__):
            self._take(default, f"a default of {name}")
        texts, where = names.texts, line_of_function(code)
        if not self._all_run and _REACHES_UNSEEN & texts:
            self._all_run = True
            while self._waiting:
                for other in self._waiting.popitem()[1]:
                    self._runs(other)
        if names.compares:
            self._compares = where
        if "type" in names.loaded and {"float", "int", "bool"} & {*names.loaded}:
            self._asks_type = where
        if "cache_info" in texts:  # planned steps do not ask the caches
            self._refuse(f"{name} reads the state of a cache{where}")
        comparing = names.comparing_classes
        if code in comparing or (self._all_run and comparing):
            self._refuse_comparison(code)
        if asking := _ASKS_UNSEEN & texts:
            self._may_run_once(f"it calls {min(asking)}(){where}")
        for name in names.stored:
            what = f"global {name!r}{where}"
            self._note_written((id(around), name), Kind.ENTRY, around, name, what)
        for name in names.loaded:
            value = self._note(Kind.ENTRY, around, name, f"global {name!r}{where}")
            if value is MISSING:
                held = vars(builtins)
                value = self._note(Kind.ENTRY, held, name, f"builtin {name!r}")
                if value in _LOOKS_ANYWHERE:
                    self._may_run_once(f"it calls {name}(){where}")
            self._take(value, f"global {name!r}")
            paths = isinstance(value, type) and issubclass(value, pathlib.Path)
            if paths and (asking := _ASKS_FILES & texts):
                self._may_run_once(f"it calls {min(asking)}(){where}")
            self._namespace(value, names, where)
        for cell in function.__closure__ or ():
            value = Read.of(Kind.CELL, cell, None, "").value
            self._namespace(value, names, where)
            if "super" in names.loaded and isinstance(value, type):
                self._inherited(value, texts)
        for level, name in names.imported:
            self._imported("." * level + name, around, names, where)

    def _inherited(self, cls: type, texts: Iterable[str]) -> None:
        """Note what `super()` may find in a class's bases that are of a library."""
        for base in cls.__mro__[1:-1]:
            if base not in self._users:
                replaced = _NOTING | _TRACED if base is nn.Module else _NOTING
                for name in (self._vars_of(base).keys() & texts) - replaced:
                    self._note(Kind.CLASS, base, name, f"{base.__name__}.{name}")

    def _imported(
        self, name: str, around: dict[str, Any], names: "_Names", where: str
    ) -> None:
        """Note what a function imports when it runs."""
        parts = importlib.util.resolve_name(name, around.get("__package__")).split(".")
        for i in range(len(parts)):
            name = ".".join(parts[: i + 1])
            module = sys.modules.get(name)
            if module is None:
                label = f"whether {name} is imported{where}"
                asked = operator.methodcaller("__contains__", name)
                read = Read(Kind.ASKED, sys.modules, asked, False, label)
                self._imports[name] = f"it imports {name}{where}"
                self._reads.setdefault((id(sys.modules), name), read)
                return
            self._take(module, name)
            self._namespace(module, names, where)

    def _namespace(
        self, module: Any, names: "_Names", where: str, *, inner: bool = False
    ) -> None:
        """Note the names of a module that a code may take."""
        if isinstance(module, type) and issubclass(module, datetime.date):
            module = datetime
        if not isinstance(module, types.ModuleType):
            return
        held = vars(module)
        named = [text for text in names.texts if text in held and text[:2] != "__"]
        for text in names.strings - held.keys():  # as `getattr` may look for them
            self._note(Kind.ENTRY, held, text, f"{module.__name__}.{text}")
        if module.__name__ in _TELLS_TIME and any(callable(held[n]) for n in named):
            self._may_run_once(f"it uses {module.__name__}.{named[0]}{where}")
        asking = _ASKS_OUTSIDE.get(module.__name__, frozenset()) & names.texts
        # A watched call of `torch.load` is seen: other objects have a `load`, too.
        if asking and (module is not torch or self._all_run):
            self._may_run_once(f"it calls {min(asking)}(){where}")
        if module is logging:
            self._take(logging.root, "the root logger")
        if module is os and {"environ", "getenv"} & names.texts:
            self._contents(os.environ._data, "os.environ")  # type: ignore[attr-defined]
        for name in named:
            label = f"{module.__name__}.{name}"
            value = self._note(Kind.ENTRY, held, name, label)
            if isinstance(value, torch.library.CustomOpDef):
                self._take(value, label)
            elif isinstance(value, types.ModuleType) and (
                value.__name__ in _ASKS_OUTSIDE
            ):
                if not inner and module not in (torch, nn.functional):
                    self._namespace(value, names, where, inner=True)
            elif not _is_unseen(module) and module is not os:
                self._take(value, label)

    def _watch_namespace(self, module: types.ModuleType) -> None:
        """Have a user's module note names that are put together when they are read."""
        file = getattr(module, "__file__", None)
        library = is_library_file(file) if file else _is_unseen(module)
        builtin = module.__name__ in sys.builtin_module_names
        if type(module) is not types.ModuleType or library or builtin:
            return
        note, take = self._note, self._take

        class Noting(types.ModuleType):
            def __getattribute__(own, name: str) -> Any:  # noqa: N805
                if name[:2] != "__" and not self._paused:
                    self._paused = True
                    try:
                        held, label = vars(module), f"{module.__name__}.{name}"
                        value = note(Kind.ENTRY, held, name, label)
                        if value is MISSING:
                            take(held.get("__getattr__"), label)
                        take(value, label)
                    finally:
                        self._paused = False
                return types.ModuleType.__getattribute__(own, name)

        module.__class__ = Noting
        self._namespaces.append(module)


_TYPE = (
    "the step asks for the type of a number{}, which is a symbol during capture; use "
    "isinstance()"
)

_CACHE = (
    "the step fills {}, a function with a cache, which {}; call it once before the step"
)


def _code_calling(function: Callable[[Any, Any], Any], count: int) -> types.CodeType:
    """Return a code that passes all arguments to a function.

    Args:
        function: Called with a tuple and a dict of arguments.
        count: Number of free variables, which the code of a function cannot change.
    """
    free = ", ".join(f"v{i}" for i in range(count))
    source = (
        f"def outer({free}):\n  def inner(*args, **kwargs):\n    call = 'function'\n"
        f"    return call(args, kwargs)\n    ({free})\n  return inner\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), space)
    code: types.CodeType = space["outer"](*range(count)).__code__
    consts = (function if c == "function" else c for c in code.co_consts)
    return code.replace(co_consts=tuple(consts))


def _generator_states() -> list[Any]:
    """Return the states of all generators that every function may draw from."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    numpys = Read.of(Kind.GENERATOR, np.random, None, "").value
    return [*(state.tolist() for state in states), numpys, random.getstate()]


def _hooks_of_all() -> dict[str, Any]:
    """Return the hooks that PyTorch runs for every module and every optimizer."""
    of_modules = sys.modules[nn.Module.__module__]
    of_optimizers = sys.modules[torch.optim.Optimizer.__module__]
    return {
        f"{name} of {holder.__name__}": value
        for holder in (of_modules, of_optimizers)
        for name, value in vars(holder).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


_NAMED = (Kind.ENTRY, Kind.CLASS, Kind.SLOT)


def _key_of(kind: Kind, holder: Any, key: Any) -> Any:
    """Return what is equal for notes of the same piece of state."""
    return (id(holder), key) if kind in _NAMED else (kind, id(holder))


_NOTING = frozenset({"__getattribute__", "__setattr__", "__delattr__", "__init__"})
"""Methods of classes that the recorder replaces while a step is captured."""

_TRACED = frozenset({"__call__", "__getattr__"})
"""Methods of `nn.Module` that PyTorch's tracer replaces."""

_COPYING = frozenset({"__reduce__", "__reduce_ex__", "__getstate__"})
"""Methods that return everything an object holds."""

_METHODS = (types.FunctionType, staticmethod, classmethod, property)

_CALLED = (
    types.FunctionType, staticmethod, classmethod, property, type,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip

_WEAK_CONTAINERS = (
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)

_NAMESPACES = (
    types.SimpleNamespace, threading.local, threading.Event, threading.Semaphore,
)  # fmt: skip

_KEPT_ALIVE = (type(None), nn.Module, torch.optim.Optimizer, torch.Tensor)
"""Types whose objects a step holds anyway, so that references to them do not die."""

_RANDOM = (
    random.Random,
    np.random.BitGenerator,
    np.random.Generator,
    np.random.RandomState,
)


@dataclass(frozen=True)
class _Names:
    """Names that a code object and its nested functions refer to.

    Attributes:
        loaded: Globals that it reads.
        stored: Globals that it writes and does not read.
        free_stored: Free variables that it writes and does not read.
        texts: Every name by which it may take an attribute of something but `self`.
        strings: Those of them that are strings in the code.
        imported: Modules that it imports: how many packages up, and the name.
        compares: Whether it compares two values by `is`.
        comparing_classes: Which of these compare a class with that of tensors.
    """

    loaded: tuple[str, ...]
    stored: tuple[str, ...]
    free_stored: frozenset[str]
    texts: frozenset[str]
    strings: frozenset[str]
    imported: frozenset[tuple[int, str]]
    compares: bool
    comparing_classes: frozenset[types.CodeType]


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    found: dict[str, dict[str, None]] = collections.defaultdict(dict)
    texts, strings = set(), set()
    imported: set[tuple[int, str]] = set()
    before: list[Any] = [None, None]  # operands of the last two instructions
    loads, compares, compares_class = "", False, False
    comparing: set[types.CodeType] = set()
    operands: set[Any] = set()  # since the last call or assignment
    for instruction in dis.get_instructions(code):
        found[instruction.opname][instruction.argval] = None
        if instruction.opname == "IMPORT_NAME":
            imported.add((before[0], instruction.argval))
        takes = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if instruction.argval in code.co_names and not (takes and before[1] == "self"):
            texts.add(instruction.argval)
        before = [before[1], instruction.argval]
        # What follows on a constant, such as None, compares no tensors.
        compares |= instruction.opname == "IS_OP" and loads != "LOAD_CONST"
        loads = instruction.opname
        if loads in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
            compares_class |= not operands.isdisjoint(("Tensor", "Parameter"))
        operands.add(instruction.argval)
        if loads.startswith(("CALL", "STORE")):
            operands.clear()
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            strings.add(constant)
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            texts |= inner.texts
            strings |= inner.strings
            imported |= inner.imported
            compares |= inner.compares
            comparing |= inner.comparing_classes
            found["LOAD_GLOBAL"] |= dict.fromkeys(inner.loaded)
            found["STORE_GLOBAL"] |= dict.fromkeys(inner.stored)
            found["STORE_DEREF"] |= dict.fromkeys(inner.free_stored)
            # What an inner function does not only write, it may read.
            free = [n for n in constant.co_freevars if n not in inner.free_stored]
            found["LOAD_DEREF"] |= dict.fromkeys(free)
    loaded = found["LOAD_GLOBAL"] | found["LOAD_NAME"]
    if compares_class and ("type" in loaded or "__class__" in texts):
        comparing.add(code)
    return _Names(
        tuple(loaded),
        tuple(name for name in found["STORE_GLOBAL"] if name not in loaded),
        frozenset(
            name
            for name in code.co_freevars
            if name in found["STORE_DEREF"] and name not in found["LOAD_DEREF"]
        ),
        frozenset(texts | strings),
        frozenset(strings),
        frozenset(imported),
        compares,
        frozenset(comparing),
    )


@functools.cache
def _codes_in(code: types.CodeType) -> frozenset[int]:
    """Return the identities of a code object and of those of its inner functions."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset({id(code)}).union(*map(_codes_in, inner))


def _is_unseen(value: Any) -> bool:
    """Return whether a class, module or function is of a package not looked into."""
    module = value if isinstance(value, types.ModuleType) else None
    name = module.__name__ if module else getattr(value, "__module__", None) or ""
    package = name.partition(".")[0]
    if isinstance(value, type):
        if _is_of_other_module(value) or package == "numpy":
            return False
        if name.startswith("torch."):
            return _UNSEEN_OF_TORCH.match(name) is not None
    return package in _UNSEEN_MODULES or package in torch_packages()


@functools.cache
def _active_recorders() -> list[ReadRecorder]:
    """Return a list for the recorder that notes the interpreter's audit events now.

    The first call installs an audit hook, which Python cannot remove again.
    """
    active: list[ReadRecorder] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if active and event.startswith(_AUDITED):
            active[0].note_event(event, args, sys._getframe(1))

    sys.addaudithook(hook)
    return active


def _is_of_step(frame: types.FrameType | None) -> bool:
    """Return whether a user's function runs, or a library's that it has called.

    PyTorch's own functions read files when they trace or compile.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        beside = frame.f_globals.get("__name__") in _BESIDE_STEP
        if beside or is_torch_file(file):
            return False
        if not is_library_file(file):
            return not _is_beside_step(frame)
        frame = frame.f_back
    return False


def _is_beside_step(frame: types.FrameType | None) -> bool:
    """Return whether the garbage collector or a logger calls a function.

    Collections begin at any allocation, and PyTorch logs what it traces: what is called
    then is no part of the step.
    """
    callers = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    callers.add(logging.Logger.callHandlers.__code__)
    while frame is not None and frame.f_code not in callers:
        frame = frame.f_back
    return frame is not None


def _is_of_library(frame: types.FrameType) -> bool:
    """Return whether a function of Python, PyTorch or a package it requires runs."""
    package = str(frame.f_globals.get("__name__", "mucudnn")).partition(".")[0]
    return (
        is_library_file(frame.f_code.co_filename)
        or package in sys.stdlib_module_names  # methods made by `exec` have no file
        or package in (*_UNSEEN_MODULES, "mpmath", "torchgen")
        or package.startswith("namedtuple_")
        or package in torch_packages()
    )


def _is_library(cls: type) -> bool:
    """Return whether a class is of Python, PyTorch or a package that it requires."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" or file is None:
        return cls.__module__ in sys.builtin_module_names
    return is_library_file(file) and not _is_of_other_module(cls)


def _is_of_other_module(cls: type) -> bool:
    """Return whether a class is not of its module, by its name and its functions.

    What `types.new_class` and `abc.ABCMeta` make says that it is of their module.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__qualname__.partition(".")[0] in vars(module):
        return False
    codes = (getattr(value, "__code__", None) for value in vars(cls).values())
    return not any(is_library_file(code.co_filename) for code in codes if code)


def _is_python_class(kind: type) -> bool:
    """Return whether a class is made by a class statement, on bases that are seen."""
    heap = kind.__flags__ & (1 << 9) and not kind.__flags__ & (1 << 8)
    if not heap:
        return False
    bases = [base for base in kind.__mro__ if not base.__flags__ & (1 << 9)]
    seen = (*_SEEN_BASES, *_STILL)
    return all(base in seen or issubclass(base, BaseException) for base in bases)


@functools.cache
def _is_still(kind: Any) -> bool:
    """Return whether a class is no user's own, which may add state to a still one."""
    return _is_library(kind) or not kind.__flags__ & (1 << 9)


_SEEN_BASES = (
    *(object, *CONTAINERS, int, float, complex, str, bytes, type),
    *(collections.OrderedDict, collections.defaultdict),
)


def _is_traced(value: Any) -> bool:
    own = type(value) is torch.Tensor or issubclass(type(value), nn.Parameter)
    return isinstance(value, torch.Tensor) and not own


def _is_machinery(obj: Any, name: str) -> bool:
    """Return whether a name is a method of `nn.Module` that an object does not replace.

    Whoever walks a model reads such methods of all its modules.
    """
    own = vars(nn.Module).get(name)
    return (
        isinstance(obj, nn.Module)
        and isinstance(own, types.FunctionType)
        and getattr(type(obj), name, None) is own
        and name not in vars(obj)
    )


def _dict_of(obj: Any) -> Any:
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None


def _reason(effect: Effect) -> str:
    """Return why a step with an effect on what it reads is captured for one run."""
    place = effect.place
    if place.kind is Kind.GENERATOR:
        return f"it draws from {place.label}; use PyTorch's generator (torch.rand)"
    values = f"({shown(place.value)} -> {shown(effect.after)})"
    return f"it changes {place.label}, which it also reads {values}"
