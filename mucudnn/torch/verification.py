"""A self-check: a planned step is compared with the same step in eager mode.

The eager step runs first, on the model itself, and everything it changed is put back:
tensors in place, containers of modules, optimizer and scaler, random generators. Deep
copies would not do, as a copied loss function shares the modules that it closes over.

Where results may differ by rounding, the tolerance is measured: the eager step runs a
second time with parameters and batch changed by about one rounding error. That tells
tensors that amplify rounding, as Adam does with gradients of about zero, from others.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.errors import VerificationError
from mucudnn.torch.capture.python_state import Kind, Read, contents_of, is_alike
from mucudnn.torch.capture.step_tensors import Batch, StepSettings, root_of
from mucudnn.torch.eager_step import run_eager_step
from mucudnn.torch.execution.devices import DEVICES, forked_generators

_ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
"""How much parameters and batch are changed to measure what rounding does."""

_SLACK = 8
"""How many times the measured difference is allowed.

Its square is allowed where an eighth of the largest value differs: where only rounding
is left, as of a gradient of 0, which RMSprop squares, its size differs, too.
"""

_HOLDERS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_MISSING = "nothing"


@dataclass(frozen=True)
class VerifiedStep:
    """A step to be checked; its parts are those of `run_eager_step`.

    Attributes:
        exact: Whether results must be equal, not only up to rounding. GRUs are planned
            as PyTorch's plain operations.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    batch: Batch
    settings: StepSettings
    exact: bool

    def run(self, planned: Callable[[], Any], number: int) -> Any:
        """Run the step in eager mode and as planned; return what the latter returns.

        Raises:
            VerificationError: Results differ; names the first tensor that does.
        """
        root = root_of(self.model, self.loss_fn)
        scaler, tensors = self.settings.scaler, self.batch.tensors
        kept = _Kept([root, self.optimizer, scaler, *tensors])
        wanted = self._eager_results(kept)
        noise: dict[str, float] = {}
        units = torch.nn.GRU, torch.nn.GRUCell
        if not self.exact or any(isinstance(m, units) for m in root.modules()):
            noisy = self._eager_results(kept, [*root.parameters(), *tensors])
            noise = {n: _allowed(wanted[n], noisy.get(n, _MISSING)) for n in wanted}
        result = planned()
        found = dict(self._results(result))
        pairs = {
            name: (wanted.get(name, _MISSING), found.get(name, _MISSING))
            for name in dict.fromkeys((*wanted, *found))
        }
        wrong = [n for n, pair in pairs.items() if _gap(*pair) > noise.get(n, 0.0)]
        if wrong:
            allowed = noise.get(wrong[0], 0.0)
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise VerificationError(
                f"step {number}: {wrong[0]}{more} differs from that of the same step "
                f"in eager mode: {_described(*pairs[wrong[0]], allowed)}. The model "
                "has the planned step's results: load a checkpoint, train without "
                "train_step, and please report this"
            )
        return result

    def _eager_results(
        self, kept: "_Kept", perturbed: Sequence[torch.Tensor] = ()
    ) -> dict[str, Any]:
        """Run the step in eager mode, put back what it changed; return its results."""
        with forked_generators(kept.tensors):
            try:
                _perturb(perturbed)
                result = run_eager_step(
                    *(self.model, self.loss_fn, self.optimizer),
                    *(self.batch, self.settings),
                )
                return {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in self._results(result)
                }
            finally:
                kept.put_back()

    def _results(self, result: Any) -> Iterator[tuple[str, Any]]:
        """Yield everything that a step returns or changes, by name."""
        loss, extras = result if isinstance(result, tuple) else (result, None)
        root = root_of(self.model, self.loss_fn)
        yield "the loss", loss
        yield from _leaves("what comes back with the loss", extras)
        for name, buffer in root.named_buffers():
            yield f"buffer {name.removeprefix('model.')!r}", buffer.detach()
        names = {}
        for name, parameter in root.named_parameters():
            names[parameter] = f"parameter {name.removeprefix('model.')!r}"
            yield names[parameter], parameter.detach()
        for i, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    of = names.get(parameter, "another parameter")
                    yield from _leaves(f"state {key} of {of}", value)
            held = {key: v for key, v in group.items() if key != "params"}
            yield from _leaves(f"the optimizer's group {i}", held)
        if self.settings.scaler is not None:
            yield from _leaves("the scaler", self.settings.scaler.state_dict())
        yield from _leaves("the batch", self.batch.tensors)
        yield "the CPU's random generator", torch.get_rng_state()


class _Kept:
    """Tensors and containers of objects, to be put back as they are now."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.tensors: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        self._containers: list[Read] = []
        pending, seen = list(objects), set()
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _HOLDERS):
                value = vars(value)
            if isinstance(value, torch.Tensor):
                self.tensors[value] = value.detach(), value.detach().clone()
            elif isinstance(value, dict | list | set | deque):
                content = contents_of(value)
                read = Read(Kind.CONTENTS, value, None, content, "", is_exact=True)
                self._containers.append(read)
                pending += content
            elif isinstance(value, tuple):
                pending += value

    def put_back(self) -> None:
        """Have every container and tensor hold what it held."""
        for container in self._containers:
            if not container.holds(container.now()):
                container.put(container.value)
        for tensor, (alias, before) in self.tensors.items():
            if (tensor.data_ptr(), tensor.shape) != (alias.data_ptr(), alias.shape):
                tensor.data = alias
            if not _overlaps(alias):  # such tensors cannot have been written to
                alias.copy_(before)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _perturb(tensors: Sequence[torch.Tensor]) -> None:
    """Change tensors by about one rounding error of what is computed with them."""
    floats = [t for t in tensors if t.dtype in _ROUNDING and not _overlaps(t)]
    casts = [kind for kind in DEVICES if torch.is_autocast_enabled(kind)]
    kinds = {torch.get_autocast_dtype(kind) for kind in casts}
    for tensor in floats:
        # Convolutions on CUDA devices may round float32 to TF32, with float16's bits.
        narrow = tensor.is_cuda and tensor.dtype is torch.float32
        kinds.add(torch.float16 if narrow else tensor.dtype)
    amount = max((_ROUNDING[kind] for kind in kinds), default=0.0)
    for tensor in floats:
        generator = torch.Generator(tensor.device).manual_seed(0)
        factor = torch.empty_like(tensor, dtype=torch.float64, requires_grad=False)
        factor.uniform_(1 - amount, 1 + amount, generator=generator)
        tensor.detach().copy_(tensor.detach() * factor)


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        yield f"{name}{pytree.keystr(path)}", leaf


def _gap(wanted: Any, found: Any) -> float:
    """Return the largest absolute difference of two values; NaN equals NaN."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return 0.0 if is_alike(wanted, found) else math.inf
    if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
        return math.inf
    gaps = _gaps(wanted, found)
    return float(gaps.max()) if len(gaps) else 0.0


def _gaps(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences of the elements that are not alike."""
    differs = (wanted != found) & ~(wanted.isnan() & found.isnan())
    gaps = (_wide(wanted[differs]) - _wide(found[differs])).abs()
    return gaps.nan_to_num(nan=math.inf)


def _allowed(wanted: Any, noisy: Any) -> float:
    """Return by how much a value may differ, given its value after `_perturb`."""
    if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        return float(_SLACK * _gap(wanted, noisy))
    largest, gap = _largest(wanted), _gap(wanted, noisy)
    slack = _SLACK if _SLACK * gap < largest else _SLACK**2
    return slack * (gap + float(torch.finfo(wanted.dtype).eps) * largest)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: torch.Tensor) -> float:
    finite = _wide(tensor).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if tensor.numel() else 0.0


def _described(wanted: Any, found: Any, allowed: float) -> str:
    """Say how two values differ by more than what is allowed."""

    def kind(value: Any) -> str:
        tensor = isinstance(value, torch.Tensor)
        return f"{value.dtype} {tuple(value.shape)}" if tensor else str(value)

    if kind(wanted) != kind(found) or not isinstance(wanted, torch.Tensor):
        return f"{kind(found)}, not {kind(wanted)}"
    gap = _gap(wanted, found)
    count = int((_gaps(wanted, found) > allowed).sum())
    relative = gap / (_largest(wanted) or math.inf)
    return (
        f"{count} of {wanted.numel()} elements, by at most {gap:.3g} "
        f"({relative:.3g} of the largest)"
    )
