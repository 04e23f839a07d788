"""Operations that are captured in another way than PyTorch runs them.

The planner decides what is recomputed. A checkpoint in the model would be captured as
two computations, with different random numbers, so checkpoints are turned off; the step
computes the same without them. `torch.compile` is undone for the same reason.
"""

import abc
import builtins
import logging
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
import torch._dynamo.config
from torch._functorch import eager_transforms
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import checkpoint

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.reads import ReadRecorder, UnsoundCaptureError
from mucudnn.torch.internals import replaced
from mucudnn.torch.source_lines import is_library_file, is_torch_file, line_now


@contextmanager
def uncompiled(root: torch.nn.Module, recorder: ReadRecorder) -> Iterator[None]:
    """Run what `torch.compile` and `Module.compile` have compiled as written."""
    held = [(m, m._compiled_call_impl) for m in root.modules() if m._compiled_call_impl]
    for module, _ in held:
        recorder.lend(vars(module), "_compiled_call_impl", "what a module compiled")
        module._compiled_call_impl = None
    nested = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    try:
        # What Dynamo met under the modes of a capture, torch.cond would never compile.
        with nested, torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, compiled in held:
            module._compiled_call_impl = compiled


@contextmanager
def output_noted(recorder: ReadRecorder) -> Iterator[None]:
    """Note where the step prints or logs, and the loggers that it asks for by name."""
    show, handle = builtins.print, logging.Logger.handle
    get = logging.Manager.getLogger

    def noting_print(*args: Any, **kwargs: Any) -> None:
        recorder.writes = recorder.writes or line_now()
        show(*args, **kwargs)

    def noting_handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger.name == fake_tensor.__name__ and record.exc_info:
            return  # PyTorch raises the exception, too
        if logger.name.partition(".")[0] not in ("torch", "mucudnn"):
            recorder.writes = recorder.writes or line_now()
        handle(logger, record)

    def noting_get(manager: logging.Manager, name: str) -> logging.Logger:
        logger = get(manager, name)
        if not is_torch_file(sys._getframe(2).f_code.co_filename):
            recorder.take_logger(logger)
        return logger

    recorder.lend(vars(builtins), "print", "builtin 'print'")
    of_loggers = replaced(logging.Logger, handle=noting_handle)
    of_names = replaced(logging.Manager, getLogger=noting_get)
    with replaced(builtins, print=noting_print), of_loggers, of_names:
        yield


@contextmanager
def asked_as_eagerly(
    recorder: ReadRecorder, identities: Mapping[int, int], batch: Collection[int]
) -> Iterator[None]:
    """Tell users' code that numbers and tensors of the graph are those of eager mode.

    `isinstance` and `match` take a symbol for a Python number, dicts for its value; as
    text it is refused, as a tensor is. `id`, sets and dicts take what stands in for a
    tensor for that tensor itself.

    Args:
        recorder: Is told what is replaced, and what is asked.
        identities: Identity of a stand-in -> identity of the tensor.
        batch: Identities of the tensors of the batch.
    """
    identity, plainly = builtins.id, torch.Tensor.__format__
    show = FunctionalTensor.__repr__

    def identity_of(value: Any) -> int:
        if is_library_file(sys._getframe(1).f_code.co_filename):
            return identity(value)
        return hash_of(value)

    def hash_of(tensor: Any) -> int:
        own = identities.get(identity(tensor), identity(tensor))
        if own in batch:
            caller = sys._getframe(1).f_code.co_filename
            if caller == __file__ or not is_library_file(caller):
                said = f"it asks which tensor the batch has{line_now()}"
                recorder.lasts_one_run(said)
        return own

    def is_users(caller: FrameType) -> bool:
        while caller.f_back and caller.f_code.co_filename == _ABSTRACT:
            caller = caller.f_back
        return not is_torch_file(caller.f_code.co_filename)

    def refuse_text(caller: FrameType) -> None:
        if not is_library_file(caller.f_code.co_filename):
            raise UnsoundCaptureError(
                f"the step writes a number or tensor as text{line_now()}, whose value "
                "is unknown during capture; do so outside, with what the step returns"
            )

    def text_of(tensor: FunctionalTensor) -> str:
        refuse_text(sys._getframe(1))
        return str(show(tensor))

    def formatted(tensor: torch.Tensor, form: str) -> str:
        if isinstance(tensor, FunctionalTensor):
            refuse_text(sys._getframe(1))
        return str(plainly(tensor, form))

    def as_number(symbol: Any, plain: Any) -> AbstractContextManager[None]:
        """Have a class of symbols look like a class of Python's numbers to users."""
        plain_text, key = symbol.__repr__, symbol.__hash__

        def attribute(number: Any, name: str) -> Any:
            if name == "__class__" and is_users(sys._getframe(1)):
                return plain
            return object.__getattribute__(number, name)

        def text(number: Any, *form: str) -> str:
            refuse_text(sys._getframe(1))
            return object.__format__(number, *form) if form else plain_text(number)

        def hashed(number: Any) -> int:
            return hash(plain(number)) if is_users(sys._getframe(1)) else key(number)

        names = {"__getattribute__": attribute, "__hash__": hashed}
        return replaced(symbol, __repr__=text, __format__=text, **names)

    recorder.lend(vars(builtins), "id", "builtin 'id'")
    with (
        replaced(builtins, id=identity_of),
        replaced(torch.Tensor, __hash__=hash_of, __format__=formatted),
        replaced(FunctionalTensor, __repr__=text_of),
        as_number(torch.SymFloat, float),
        as_number(torch.SymInt, int),
        as_number(torch.SymBool, bool),
    ):
        yield


_ABSTRACT = abc.ABCMeta.__instancecheck__.__code__.co_filename
"""File of Python's function by which `isinstance` asks an abstract class."""


class _Stateless:
    """PyTorch's generator, whose state is unknown to the thread that captures."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise UnsupportedError(
                f"the step reads or sets the state of PyTorch's generator{line_now()}, "
                "as torch.manual_seed and fork_rng do; do so outside the step"
            )
        return getattr(self._generator, name)


def seeding_refused() -> AbstractContextManager[None]:
    """Refuse a step that reads or sets the state of PyTorch's generator.

    A planned step draws the numbers that follow on those of the step before.
    """
    generator = _Stateless(torch.random.default_generator)
    return replaced(torch.random, default_generator=generator)


def linearizing_refused() -> AbstractContextManager[None]:
    """Refuse a step that calls `torch.func.linearize`, whose trace sees no values."""

    def refuse(*_: Any) -> Callable[..., Any]:
        raise UnsoundCaptureError(
            f"the step calls linearize(){line_now()}, which traces a function itself; "
            "call torch.func.jvp"
        )

    return replaced(eager_transforms, lazy_dynamo_disallow=refuse)


def plain_checkpoints(
    noting: Callable[[bool], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Make `torch.utils.checkpoint` call its function without a checkpoint.

    Args:
        noting: Notes what is changed within its context: eager mode runs the function
            twice. It is told whether random numbers are the same then.
    """

    class Plain:
        """Replacement of the autograd function of a reentrant checkpoint."""

        @staticmethod
        def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
            with noting(preserves):
                return function(*args)

    def plain_generator(
        _: Any, preserves: bool = True, *_args: Any, **_kwargs: Any
    ) -> Iterator[None]:
        """Replace the generator around a non-reentrant checkpoint."""
        with noting(preserves):
            yield

    plain = {
        "CheckpointFunction": Plain,
        "_checkpoint_without_reentrant_generator": plain_generator,
        "_checkpoint_without_reentrant_generator_impl": plain_generator,  # from 2.14 on
    }
    known = {name: new for name, new in plain.items() if name in vars(checkpoint)}
    return replaced(checkpoint, **known)


# Batch norms with cumulative averages, `momentum=None`.
#
# The weight of a batch is one over the count of batches, which differs in every step,
# and PyTorch's function takes a number, not a tensor. The call is captured with a mark
# in place of the number, which is a number that occurs nowhere else. After the capture
# every mark is replaced by a node that computes the weight from the count.


_FIRST = 0.6180339887498949

_STEP = 2.0**-40


def average_weight(count: int) -> float:
    """Return the weight of the last of `count` batches in their mean."""
    return 1.0 / float(max(1, count))


class CountedAverages:
    """The batch norms of a model that have cumulative averages, during a capture."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._norms = {
            id(module): module
            for module in model.modules()
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            and module.momentum is None
            and module.training
            and module.track_running_stats
        }
        self._marks: dict[float, torch.nn.Module] = {}
        self._counts: dict[float, torch.fx.Node] = {}

    @contextmanager
    def marked(self, recorder: ReadRecorder) -> Iterator[None]:
        """Give each norm a unique momentum, by which `called` recognizes it."""
        self._marks = {_mark(i): norm for i, norm in enumerate(self._norms.values())}
        self._counts = {}
        for mark, norm in self._marks.items():
            label = f"{type(norm).__name__}.momentum"
            recorder.lend(vars(norm), "momentum", label)
            norm.momentum = mark
        try:
            yield
        finally:
            for norm in self._marks.values():
                norm.momentum = None

    def called(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of `functional.batch_norm`, with a mark of this call.

        A model may call a norm several times in a step.
        """
        norm = self._marks.get(named.get("momentum", 0.0))
        if norm is None:
            return named
        mark = _mark(len(self._marks) + len(self._counts))
        count = norm.num_batches_tracked.item()
        tracer = get_proxy_mode().tracer
        self._counts[mark] = get_proxy_slot(count, tracer).force().node
        return {**named, "momentum": mark}

    def written(self, graph: torch.fx.Graph) -> None:
        """Replace the marks in a captured graph by nodes that compute the weights."""
        for node in list(graph.nodes) if self._counts else ():
            marks = [a for a in node.args if isinstance(a, float) and a in self._counts]
            for mark in marks:
                with graph.inserting_before(node):
                    weight = graph.call_function(average_weight, (self._counts[mark],))
                weight.meta["val"] = mark
                node.args = tuple(weight if a == mark else a for a in node.args)


def _mark(number: int) -> float:
    return _FIRST + number * _STEP


# CTC's loss in graphs of static shapes.
#
# The width of the kernel's table is that of the longest target. If lengths are tensors,
# it is known only when the kernel runs. The table is then allocated for the longest
# possible target, and padded by probability zero.


_aten = torch.ops.aten


_FORWARD = frozenset({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})

_BACKWARD = frozenset(
    {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
)


def ctc_results(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the fake results of one of CTC's operations; None for any other."""
    if func in _BACKWARD:
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if func not in _FORWARD:
        return None
    probabilities, targets, _, lengths = args[:4]
    time, batch, _ = probabilities.shape
    if isinstance(lengths, torch.Tensor):
        longest = targets.shape[-1]
    else:
        longest = max(lengths, default=0)
    table = probabilities.new_empty((batch, time, 2 * longest + 1))
    return probabilities.new_empty((batch,)), table


def padded_ctc(
    probabilities: torch.Tensor,
    targets: torch.Tensor,
    times: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `aten::_ctc_loss` with a table for the longest possible target.

    The peak memory is the same for all lengths.
    """
    rows = _rows(targets, lengths)
    loss, table = _aten._ctc_loss.Tensor(
        probabilities, rows, times, lengths, blank, zero_infinity
    )
    batch, time, narrow = table.shape
    width = 2 * targets.shape[-1] + 1
    spare = table.new_empty((batch, time, width - narrow))
    whole = table.new_full((batch, time, width), -math.inf)
    whole[..., :narrow] = table
    del spare
    return loss, whole


def _rows(targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return concatenated targets as a row for each target."""
    if targets.dim() == 2:
        return targets
    ends = lengths.to(targets.device, torch.long).cumsum(0)
    size = len(targets)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    places = starts[:, None] + torch.arange(size, device=targets.device)
    return targets[places.clamp_(max=size - 1)]
