"""Compile a step's forward and backward pass by Inductor, once for all budgets.

Inductor writes each half as a straight line of allocations, kernel calls and `del`.
`wrapper_text` reads these lines, and every kernel becomes a node of the planned graph.

The halves are compiled from a captured joint graph, not by watching `torch.compile`:
traced again with Inductor's decompositions, a captured step is the joint graph that
AOTAutograd would hand to Inductor. The same passes, partitioner and compiler follow, so
kernels have the bits of `torch.compile`. Python guards, fallbacks and updates of a
captured step are kept, no step has to run for its kernels to be recorded, and
`backend`, whose joint graph comes from AOTAutograd itself, takes the same way.

Kernels are compiled without in-place results and without reuse of buffers. They are
functions then, which may run again, and the planner decides who overwrites whom.
Loops over large buffers are kernels of their own, see `_separate_loops`. New values of
buffers are results of the forward half; the plan stores them at its end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config, graph as inductor_graph
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.compile_fx import compile_fx_inner, partition_fn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.ir import NonOwningLayout
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._triton import has_triton

from mucudnn.errors import MucudnnError
from mucudnn.torch.capture.undeclared_writes import LIBRARY
from mucudnn.torch.internals import replaced
from mucudnn.torch.lowering.lowered import Layout, NotCompiledError

_LARGE = 1 << 17
"""Bytes that a kernel's loops read and write from which on no other loop joins them."""

SETTINGS: Mapping[str, Any] = {
    "inplace_buffers": False,
    "allow_buffer_reuse": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "nan_asserts": False,
    "memory_planning": False,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "graph_partition": False,
    "triton.cudagraphs": False,
    "profiler_mark_wrapper_call": False,
    # Without effect, but part of the key by which compiled graphs are cached.
    "profile_bandwidth_regex": f"loops of {_LARGE} bytes, parts together",
}
"""Settings under which the wrapper is a plain list of functional kernels."""


# Inductor draws `bernoulli` in place, in a copy that its scheduler may let others read
# before, and draws what eager mode draws (`fallback_random`) in the order of a layout
# that it chooses. This operator returns a new tensor, drawn in memory order, of a size
# and stride. The tensor that it takes only tells where it runs, and the count keeps the
# partitioner from drawing once for two equal draws: it knows PyTorch's operators only.
LIBRARY.define(
    "draw(Tensor at, int[] size, int[] stride, str kind, Scalar[] numbers, "
    "ScalarType dtype, int count) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

_DRAWS: Mapping[Any, str] = {
    torch.ops.aten.bernoulli.p: "bernoulli_",
    torch.ops.aten.rand_like.default: "uniform_",
    torch.ops.aten.randn_like.default: "normal_",
    torch.ops.aten.normal_functional.default: "normal_",
    **{
        getattr(torch.ops.aten, name).default: f"{name}_"
        for name in ("uniform", "exponential", "geometric", "log_normal", "cauchy")
    },
}
"""Operations that draw a tensor like their first argument, and the method to do so."""


def _draw(at: torch.Tensor, *given: Any) -> torch.Tensor:
    size, stride, kind, numbers, dtype, _ = given
    made = torch.empty_strided(size, stride, dtype=dtype, device=at.device)
    return made if made.is_meta else getattr(made, kind)(*numbers)


LIBRARY.impl("draw", _draw, "CompositeExplicitAutograd")
LIBRARY.impl("draw", _draw, "Meta")


@dataclass(frozen=True)
class CompiledHalf:
    """One half of a step, compiled.

    Attributes:
        source: The wrapper's source code.
        space: Globals of the wrapper: kernels and functions that its lines call.
        inputs: Names of its arguments.
        outputs: Names of its results; None for a result that is None.
    """

    source: str
    space: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str | None]


@dataclass(frozen=True)
class CompiledStep:
    """Both halves of a step, compiled.

    Attributes:
        forward: The forward half; its results are those of the step's forward pass,
            and then values that the backward half reads.
        backward: The backward half; its results are those of the backward pass.
        results: Number of results of the step's forward pass.
        symbols: Symbols of sizes: the first inputs of the joint graph.
        shapes: PyTorch's guards on them.
        names: Names of the joint graph's inputs.
    """

    forward: CompiledHalf
    backward: CompiledHalf
    results: int
    symbols: Sequence[Any] = ()
    shapes: ShapeEnv = field(default_factory=ShapeEnv, repr=False)
    names: Sequence[str] = ()

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether PyTorch's guards hold for values of the symbols."""
        return holds(self.shapes, self.symbols, sizes)


def holds(shapes: ShapeEnv, symbols: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether PyTorch's guards hold for values of symbols."""
    values = {s: sympy.Integer(n) for s, n in zip(symbols, sizes, strict=True)}
    ranges, equal = shapes.var_to_range, shapes.replacements
    return (
        all(ranges[s].lower <= n <= ranges[s].upper for s, n in values.items())
        and all(equal[s].xreplace(values) == values[s] for s in equal.keys() & values)
        and all(g.expr.xreplace(values) == sympy.true for g in shapes.guards)
    )


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where the compiler of a device's kernels is missing.

    Raises:
        NotCompiledError: There is no C++ compiler, or no Triton.
    """
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as e:
            raise NotCompiledError(
                "inductor=True compiles kernels for the CPU with a C++ compiler, and "
                f"none was found among {config.cpp.cxx}; install g++, or name one in "
                "the environment variable CXX"
            ) from e
    elif device.type != "cuda":
        raise NotCompiledError(
            f"inductor=True compiles kernels for the CPU and for CUDA, not for {device}"
        )
    elif not has_triton():
        raise NotCompiledError(
            "inductor=True compiles kernels for CUDA with Triton, which is missing or "
            "does not know this GPU; pip install triton, of the version that PyTorch "
            f"{torch.__version__} needs"
        )


def traced_joint(
    function: Callable[..., Sequence[torch.Tensor]],
    layouts: Callable[[Sequence[Any]], Sequence[Layout]],
    gradients: int,
    sizes: Sequence[int] = (),
) -> torch.fx.GraphModule:
    """Trace a step's passes to the operations that Inductor compiles.

    Args:
        function: Takes symbolic sizes, inputs of the forward pass, and last the
            gradients of its results; returns the results of the forward and then of the
            backward pass.
        layouts: Returns the layouts of inputs and gradients for the sizes.
        gradients: Number of these gradients.
        sizes: Examples of the symbolic sizes.

    Raises:
        NotCompiledError: Every size is fixed by an operation, or an operation cannot
            be traced.
    """
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    with mode, torch.no_grad(), enable_python_dispatcher():
        symbols = [symbol(shapes, f"size_{i}", n) for i, n in enumerate(sizes)]
        given = [*symbols, *(layout.empty() for layout in layouts(symbols))]
        try:
            module = make_fx(function, decomposition_table=select_decomp_table())(
                *given
            )
        except MucudnnError:
            raise
        except Exception as e:  # of PyTorch's models of kernels, which may be wrong
            raise _failed("trace", e) from e
    if sizes and all(s.node.expr.is_number for s in symbols):
        raise NotCompiledError(
            f"an operation of the model is traced for the sizes {list(sizes)} only"
        )
    # The partitioner tells inputs of the two halves apart by these names.
    placeholders = module.graph.find_nodes(op="placeholder")
    for i, node in enumerate(placeholders):
        number = i - len(given) + gradients
        node._rename(f"primals_{i + 1}" if number < 0 else f"tangents_{number + 1}")
        node.target = node.name
    draws = [node for node in module.graph.nodes if node.target in _DRAWS]
    for count, node in enumerate(draws):
        like, *numbers = node.args
        order = node.kwargs.get("memory_format") or torch.preserve_format
        dtype = node.meta["val"].dtype
        # PyTorch's own model of the operation may have other strides.
        value = torch.empty_like(like.meta["val"], dtype=dtype, memory_format=order)
        size, stride = list(value.shape), list(value.stride())
        if not all(isinstance(n, int) for n in (*size, *stride)):
            raise NotCompiledError("random numbers are drawn for a size that differs")
        drawn = size, stride, _DRAWS[node.target], numbers, dtype, count
        node.args, node.kwargs = (placeholders[len(sizes)], *drawn), {}
        node.target = torch.ops.mucudnn.draw.default
        if like.op == "call_function" and not like.users:
            module.graph.erase_node(like)
    module.recompile()
    return module


def _failed(what: str, error: Exception) -> NotCompiledError:
    text = str(error).partition("\n")[0]
    return NotCompiledError(
        f"Inductor cannot {what} the step: {type(error).__name__}: {text}"
    )


def symbol(shapes: ShapeEnv, name: str, example: int) -> Any:
    """Return a new symbolic size, which no other size of the same value is."""
    source = ConstantSource(name)
    symbol = shapes.create_symbol(example, source, DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=example, source=source)


def compile_joint(
    joint: torch.fx.GraphModule,
    results: int,
    visible: Sequence[int],
    static: Sequence[int],
) -> CompiledStep:
    """Partition a joint graph as `torch.compile` does, and compile both halves.

    Args:
        joint: The graph; the partitioner changes it.
        results: Number of results of its forward pass.
        visible: Those that the user gets, with the strides of eager mode.
        static: Inputs that are parameters or buffers.

    Raises:
        NotCompiledError: Inductor cannot compile it; says why.
    """
    given = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    mode = next(v.fake_mode for v in given if isinstance(v, torch.Tensor))
    shapes = mode.shape_env
    symbols = [v.node._expr for v in given if isinstance(v, torch.SymInt)]
    names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    # Only PyTorch's own memory is known to begin at a multiple of what kernels need.
    owned = {f"primals_{i + 1}" for i in static}
    try:
        with (
            tracing(TracingContext(mode)),
            V.set_fake_mode(mode),
            torch.no_grad(),
            config.patch(dict(SETTINGS)),
            _separate_loops(),
        ):
            with mode, enable_python_dispatcher():
                forward, backward = partition_fn(
                    joint,
                    given,
                    num_fwd_outputs=results,
                    static_lifetime_input_indices=list(static),
                )
            halves: list[CompiledHalf] = []
            strides: dict[str | None, Any] = {}
            options: dict[str, Any] = {"static_input_idxs": list(static)}
            for module in (forward, backward):
                fakes, aligned = [], []
                for node in module.graph.find_nodes(op="placeholder"):
                    fake, real = node.meta["val"], strides.get(node.name)
                    if isinstance(fake, torch.Tensor) and real is not None:
                        real = tuple(
                            shapes.deserialize_symexpr(s) if isinstance(s, str) else s
                            for s in real
                        )
                        if str(real) != str(fake.stride()):
                            with mode:
                                fake = fake.as_strided(fake.shape, real)
                    fakes.append(fake)
                    if node.name in owned or not node.name.startswith(_GIVEN):
                        aligned.append(fake)
                output = module.graph.output_node()
                outputs = [getattr(result, "name", None) for result in output.args[0]]
                seen = [i for i in visible if outputs[i]] if not halves else []
                output.meta["user_visible_output_idxs"] = seen
                with _aligned(aligned):
                    found = compile_fx_inner(module, fakes, **options)
                halves.append(half_of(found, module, outputs))
                options = {"is_backward": True}
                # Inductor chooses strides of saved values; the backward half is
                # compiled for these, as AOTAutograd does.
                own = getattr(found, "output_strides", None) or ()
                strides = dict(zip(outputs, own, strict=False))
    except NotCompiledError:
        raise
    except Exception as e:  # Inductor may fail with any error
        raise _failed("compile", e) from e
    first, second = halves
    return CompiledStep(first, second, results, symbols, shapes, names)


_GIVEN = "primals_", "tangents_"
"""Beginnings of the names of what is given to a step, by the partitioner."""


def _aligned(fakes: Iterable[Any]) -> AbstractContextManager[None]:
    """Have kernels for CUDA rely on the alignment of these inputs only.

    Inductor relies on that of all inputs, and its own runner, which is not used here,
    copies others before every call: a batch may be a slice.
    """
    known = {id(fake) for fake in fakes}
    before = inductor_graph.should_assume_input_aligned

    def is_aligned(example: torch.Tensor) -> bool:
        return id(example) in known and before(example)

    return replaced(inductor_graph, should_assume_input_aligned=is_aligned)


def _separate_loops() -> AbstractContextManager[None]:
    """Have Inductor write loops over large buffers as kernels of their own.

    On the CPU it writes all loops between two calls of PyTorch's functions as one C++
    function: the statistics of a batch norm and the ReLU behind it, or new layouts of
    all weights. To run one of them again would run all, and all results would be there
    at once. Apart they have the same bits, and cost a call each. Small loops stay
    together, and so do those that write parts of one buffer, as `cat` has them: apart,
    none of them could run again.
    """

    def ready_to_flush(self: Any) -> bool:
        nodes = self.kernel_group.scheduled_nodes
        if self._ready_to_flush or not nodes:
            return bool(self._ready_to_flush)
        touched = sum(node.get_read_write_buffers_sizes() for node in nodes)
        is_part = isinstance(nodes[-1].node.maybe_get_layout(), NonOwningLayout)
        return touched >= _LARGE and not is_part

    return replaced(CppScheduling, ready_to_flush=ready_to_flush)


def half_of(
    compiled: Any, module: torch.fx.GraphModule, outputs: Sequence[str | None]
) -> CompiledHalf:
    """Return a compiled graph with its wrapper's source and globals.

    Raises:
        NotCompiledError: Inductor returned something else than a wrapper in Python.
    """
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    if not any(node.op == "call_function" for node in module.graph.nodes):
        # Inductor returns no wrapper: the results are inputs.
        given = ", ".join(inputs)
        results = "".join(f"{name}, " for name in outputs)
        text = f"def call(args):\n    [{given}] = args\n    return ({results})"
        return CompiledHalf(text, {}, inputs, outputs)
    call = getattr(compiled, "current_callable", None)
    space = getattr(getattr(call, "__func__", call), "__globals__", None)
    source = getattr(compiled, "source_code", None)
    if not source or space is None or "empty_strided_cpu" not in space:
        raise NotCompiledError(
            f"Inductor returned {type(compiled).__name__}, not a wrapper in Python"
        )
    return CompiledHalf(source, space, inputs, outputs)
