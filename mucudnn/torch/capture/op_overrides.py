"""Operations that are captured in another way than PyTorch runs them.

The planner decides what is computed again; a checkpoint of the model's own would have
it recorded as computed twice, with other random numbers. Without it the step computes
the same. So does a module without what `Module.compile` compiled of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import checkpoint

from mucudnn.torch.capture.reads import ReadRecorder


@contextmanager
def uncompiled(root: torch.nn.Module, recorder: ReadRecorder) -> Iterator[None]:
    """Have modules that were compiled in place, by `Module.compile`, run as written.

    Args:
        root: With all modules.
        recorder: Is told, so that it notes what was compiled.
    """
    held = [(m, m._compiled_call_impl) for m in root.modules() if m._compiled_call_impl]
    for module, _ in held:
        recorder.lend(vars(module), "_compiled_call_impl", "what a module compiled")
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in held:
            module._compiled_call_impl = compiled


class _Plain:
    """Stands for the autograd function of a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """Call what would be checkpointed."""
        return function(*args)


def _plain(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stands for the generator around a checkpoint that is not reentrant."""
    yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Have `torch.utils.checkpoint` call what it is given, and no more."""
    plain = {
        "CheckpointFunction": _Plain,
        "_checkpoint_without_reentrant_generator": _plain,
        "_checkpoint_without_reentrant_generator_impl": _plain,  # from 2.14 on
    }
    before = {
        name: vars(checkpoint)[name] for name in plain if name in vars(checkpoint)
    }
    for name in before:
        setattr(checkpoint, name, plain[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoint, name, value)


# Batch norms that weigh their statistics by a count of batches, `momentum=None`.
#
# The weight is one over the count, another number in every step, and PyTorch's function
# takes a number, not a tensor. So it is recorded with a mark in the number's place, a
# number that nothing else has. When the step is recorded, every mark gives way to what
# computes the number from the count as it is then.


_FIRST = 0.6180339887498949

_STEP = 2.0**-40


def average_weight(count: int) -> float:
    """What the newest of so many batches counts in their mean."""
    return 1.0 / float(max(1, count))


class CountedAverages:
    """The batch norms of a model that count, while a step is recorded.

    Args:
        model: Whose they are.
    """

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
        """Each has a momentum of its own, which `called` knows.

        Args:
            recorder: Is told, so that the marks are no state of the user's.
        """
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
        """Arguments of `functional.batch_norm`; a mark of this call if it counts.

        A model may call one of them several times in a step.
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
        """Put what computes a number in the place of its mark, in a recorded step."""
        for node in list(graph.nodes) if self._counts else ():
            marks = [a for a in node.args if isinstance(a, float) and a in self._counts]
            for mark in marks:
                with graph.inserting_before(node):
                    weight = graph.call_function(average_weight, (self._counts[mark],))
                weight.meta["val"] = mark
                node.args = tuple(weight if a == mark else a for a in node.args)


def _mark(number: int) -> float:
    return _FIRST + number * _STEP


# CTC's loss in graphs whose shapes are known: its table is as wide as targets may be.
#
# PyTorch's kernel makes its table as wide as the longest target is. Lengths that are
# numbers tell that; lengths that are tensors tell it when the kernel runs. Then the
# table has room for the longest that there could be, and what is not there is of
# probability zero.


_aten = torch.ops.aten


_FORWARD = frozenset({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})

_BACKWARD = frozenset(
    {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
)


def ctc_results(func: Any, args: tuple[Any, ...]) -> Any:
    """What one of CTC's operations returns, without data; None of any other.

    Args:
        func: The operation.
        args: Its arguments, tensors without data.
    """
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
    """`aten::_ctc_loss` with a table for the longest target that there is room for.

    It has the same bytes in use whatever the lengths are.
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
    """A row for each target, of those that lie one behind the other."""
    if targets.dim() == 2:
        return targets
    ends = lengths.to(targets.device, torch.long).cumsum(0)
    size = len(targets)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    places = starts[:, None] + torch.arange(size, device=targets.device)
    return targets[places.clamp_(max=size - 1)]


# The Gaussian's negative log likelihood with its check in the graph.
#
# PyTorch's function asks the variances whether one is negative, which only a run can
# answer. Here the step itself asks, and raises.


_REDUCTIONS = ("mean", "sum", "none")


def gaussian_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """What `torch.nn.functional.gaussian_nll_loss` gives, bit for bit.

    Args:
        input: Means.
        target: What was seen.
        var: A variance for each mean, or one for all along one axis of size one or
            along the last axis, which it is without; or a number.
        full: Whether a constant is added.
        eps: What a variance is taken for that is less.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: A number is negative, or the shape or the reduction is none of
            these. A step with a negative entry raises RuntimeError when it runs.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not valid; one of {list(_REDUCTIONS)} is")
    if isinstance(var, float):
        if var < 0:
            raise ValueError(f"var is {var}; a variance is not negative")
        var = torch.full_like(input, var)
    else:
        fine = torch.logical_not(torch.any(var < 0))
        torch._assert_async(fine, "var has negative entry/entries")
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    _check_shape(var, input)
    variance = var.clone()
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _check_shape(var: torch.Tensor, mean: torch.Tensor) -> None:
    other = [v for v, m in zip(var.shape, mean.shape, strict=False) if v != m]
    if var.dim() != mean.dim() or other not in ([], [1]):
        raise ValueError(
            f"var is of incorrect size {tuple(var.shape)} for means of "
            f"{tuple(mean.shape)}"
        )
