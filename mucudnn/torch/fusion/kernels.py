"""Kernels: recipes compiled by PyTorch's Inductor, each once.

A kernel is called with tensors and returns tensors, without Dynamo's and autograd's
wrappers. It is compiled for the present number of threads. PyTorch's allocator sees all
of its memory but a few numbers that threads of a CPU kernel sum in.

A kernel is tried on operands like those of the step. If Inductor cannot compile it, or
its results have other layouts than in the graph or share bytes, its operations are not
fused.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mucudnn.errors import UnsupportedError
from mucudnn.torch.fusion.recipes import Recipe
from mucudnn.torch.lowering.lowered import Layout
from mucudnn.torch.source_lines import storage_of

_log = logging.getLogger(__name__)

_Function = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Kernel:
    """A compiled recipe.

    Attributes:
        run: A function of its inputs.
        into: The same with the first result in place of an input.
    """

    run: _Function
    into: _Function | None = None


class Kernels:
    """Compiles recipes, each once.

    Args:
        compiler: Compiles one recipe; Inductor by default.
    """

    def __init__(self, compiler: Callable[[Recipe], _Function] | None = None) -> None:
        self._compiler = compiler or inductor
        self._known: dict[tuple[str, int | None, int], Kernel | None] = {}

    def of(self, recipe: Recipe, taken: int | None) -> Kernel | None:
        """Return the kernel of a recipe; None if it cannot be compiled.

        Args:
            recipe: The computation.
            taken: The input that its first result may overwrite.
        """
        key = recipe.digest, taken, torch.get_num_threads()
        if key not in self._known:
            self._known[key] = self._compiled(recipe, taken)
        return self._known[key]

    def _compiled(self, recipe: Recipe, taken: int | None) -> Kernel | None:
        try:
            run = self._compiler(recipe)
            found = run(*_operands(recipe))
            wrong = _wrong(recipe, found)
            if wrong is not None:
                _log.info("%s is not fused: %s", _text(recipe), wrong)
                return None
            into = None if taken is None else self._in_place(recipe, taken, run)
        except Exception as e:  # Inductor may fail with any error
            _log.info("%s is not fused: %s: %s", _text(recipe), type(e).__name__, e)
            return None
        return Kernel(_named(run, recipe), into)

    def _in_place(self, recipe: Recipe, taken: int, run: _Function) -> _Function | None:
        """Return the in-place variant, if it computes the same bits."""
        written = recipe.into(taken)
        inner = self._compiler(written)

        def into(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (given[taken], *inner(*given))

        operands = _operands(recipe)
        expected = run(*operands)
        found = into(*operands)
        if _wrong(written, found[1:]) is not None:
            return None
        pairs = zip(expected, found, strict=True)
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in pairs):
            return None
        return _named(into, written)


def check_compiler(device: torch.device) -> None:
    """Refuse to fuse where kernels of the CPU cannot be compiled.

    Raises:
        UnsupportedError: There is no C++ compiler.
    """
    if device.type != "cpu":
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as e:
        raise UnsupportedError(
            "inductor=True compiles kernels for the CPU with a C++ compiler, and none "
            f"was found among {config.cpp.cxx}; install g++, name one in the "
            "environment variable CXX, or leave inductor out"
        ) from e


def inductor(recipe: Recipe) -> _Function:
    """Compile a recipe by Inductor.

    It is traced to the operations that Inductor knows, and compiled as a graph without
    gradients, whose results have the recipe's strides.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, torch.no_grad():
        fake = [layout.empty() for layout in recipe.inputs]
        module = make_fx(recipe.function(), decomposition_table=select_decomp_table())(
            *fake
        )
    output = next(iter(reversed(module.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(recipe.outputs)))
    output.meta["original_output_strides"] = [x.stride for x in recipe.layouts]
    options = config.patch(compile_threads=1)
    with tracing(TracingContext(mode)), torch.no_grad(), options:
        compiled: Any = compile_fx_inner(module, fake, is_inference=True)
    call = compiled.current_callable

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = call(list(given))
        return found

    return run


def _named(function: _Function, recipe: Recipe) -> _Function:
    """Name a function by its recipe, so that plans with it can be remembered."""
    function.__qualname__ = f"fused_{recipe.digest}"
    return function


def _wrong(recipe: Recipe, found: Sequence[torch.Tensor]) -> str | None:
    """Return how results differ from those of the graph; None if they do not."""
    storages = set()
    for tensor, layout in zip(found, recipe.layouts, strict=True):
        same = [tuple(tensor.shape), tensor.dtype] == [layout.shape, layout.dtype]
        steps = zip(layout.shape, tensor.stride(), layout.stride, strict=False)
        if not same or any(size > 1 and a != b for size, a, b in steps):
            return (
                f"a result is {tensor.dtype} {tuple(tensor.shape)}, {tensor.stride()}"
            )
        storage = tensor.untyped_storage()
        storages.add(storage_of(tensor))
        if storage.nbytes() != _nbytes(layout) or tensor.storage_offset():
            return f"a result has {storage.nbytes()} bytes"
    return None if len(storages) == len(found) else "results share bytes"


def _operands(recipe: Recipe) -> list[torch.Tensor]:
    """Return tensors with the layouts of the inputs, always of the same values."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for layout in recipe.inputs:
        flat = torch.zeros(_extent(layout), dtype=layout.dtype, device=layout.device)
        if layout.dtype.is_floating_point:
            flat.copy_(torch.rand(flat.shape, generator=generator))
        found.append(flat.as_strided(layout.shape, layout.stride))
    return found


def _extent(layout: Layout) -> int:
    """Return the number of elements from the first to the last."""
    sizes = zip(layout.shape, layout.stride, strict=True)
    return 0 if 0 in layout.shape else 1 + sum((n - 1) * step for n, step in sizes)


def _nbytes(layout: Layout) -> int:
    return _extent(layout) * int(layout.dtype.itemsize)


def _text(recipe: Recipe) -> str:
    return ", ".join(str(step.call.function) for step in recipe.steps)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
