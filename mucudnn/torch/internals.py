"""Private names of PyTorch that are used.

Each function is one such thing, and says what PyTorch would have to offer instead.
Public are `torch.compile` itself, `torch.fx` and `torch.compiler.disable`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._guards import detect_fake_mode
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import _side_effectful_functions
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.torch.source_lines import storage_of

_CHECK = torch.ops.aten._linalg_check_errors.default


def aot_compiled(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    compiled: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    *,
    static: bool,
) -> Callable[..., Any]:
    """Forward and backward of a captured graph by AOTAutograd.

    `aot_autograd` is what PyTorch's guide to backends names; `partition_fn`, which is
    given both halves as one graph, is documented only in its source.

    Args:
        module: As Dynamo captured it.
        inputs: Examples of its inputs.
        partition: Cuts the joint graph into two.
        compiled: Compiles a half, or a graph without gradients.
        static: Whether numbers among the inputs are constants of the graph.
    """
    compiler = aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=partition,
        ignore_shape_env=static,
    )
    with _checks_in_place():
        found: Callable[..., Any] = compiler(module, inputs)
    return found


@contextmanager
def _checks_in_place() -> Iterator[None]:
    """Operations that only raise are in graphs as they are, not threaded by tokens.

    AOTAutograd would have tokens among the inputs and results of both halves; there is
    no public way to have it leave an operation where it is. Nor is there one to have it
    take an operation for needed that nobody reads, but for good.
    """
    held = getattr(singleton.find(_CHECK._schema.name), "effect", None)
    before = None if held is None else held.effect
    known = _CHECK in _side_effectful_functions
    _side_effectful_functions.add(_CHECK)
    if held is not None:
        held.register(None)
    try:
        yield
    finally:
        if held is not None:
            held.register(before)
        if not known:
            _side_effectful_functions.discard(_CHECK)


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Tensors are real and without gradients, operations as they are called.

    While a graph is traced, fake tensors are made by a dispatch mode; there is no
    public way to step out of it. Automatic casts are off: what is cast is in the graph.
    """
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


@contextmanager
def while_compiling() -> Iterator[None]:
    """As Dynamo compiles: one thread at a time, in no dispatch mode of the user's.

    Random numbers that are drawn meanwhile are drawn again. Dynamo has a lock, and no
    public way to compile what it has captured once more. Nor is there one to say that
    what is traced is compiled: compiled functions that other threads call meanwhile
    would refuse to be traced.
    """
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)
    with (
        compile_lock,
        session(),
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
    ):
        yield


@contextmanager
def kernels_corrected(
    inputs: Sequence[Any], correct: Callable[[Any, Any, Any, Any], Any]
) -> Iterator[None]:
    """Fake tensors come from PyTorch's models of its kernels, corrected.

    Dynamo makes the mode that has these models, and AOTAutograd traces with it; neither
    lets a backend choose another.

    Args:
        inputs: Fake tensors, whose mode it is.
        correct: Given the mode, an operation, its arguments and what the model says.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    dispatch = mode.dispatch

    def corrected(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = dispatch(func, types, args, kwargs)
        return correct(mode, func, (args, kwargs or {}), found)

    mode.dispatch = corrected
    try:
        yield
    finally:
        del mode.dispatch


def examples_of(given: Sequence[Any]) -> list[Any]:
    """Fake tensors like those given, of sizes that are no symbols.

    Tracing itself makes such ones of real tensors, but without a place for numbers that
    depend on data: Python numbers that come from tensors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return [
        mode.from_tensor(value, static_shapes=True)
        if isinstance(value, torch.Tensor)
        else value
        for value in given
    ]


def break_reasons() -> dict[str, int]:
    """Why Dynamo has not captured something, a line each, and how often.

    PyTorch's guide to graph breaks names these counters; they are nowhere else, and
    `torch._dynamo.reset` leaves them.
    """
    found: dict[str, int] = {}
    for kind in ("graph_break", "unimplemented"):
        for reason, count in counters[kind].items():
            line = " ".join(str(reason).partition("\n")[0].split()).rstrip(".")
            found[line] = found.get(line, 0) + count
    return found


def refresh_values(module: torch.fx.GraphModule) -> None:
    """Have example values of a graph share storages as its operations say.

    Dynamo makes tensors of the Python numbers that change from call to call, and leaves
    the values of what is computed from them as they were.
    """
    if any(map(_is_stale_view, module.graph.nodes)):
        given = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        tensors = (value for value in given if isinstance(value, FakeTensor))
        mode = next(tensor.fake_mode for tensor in tensors)
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*given)


def _is_stale_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    value = node.meta.get("val")
    if schema is None or not isinstance(value, torch.Tensor):
        return False
    of = [
        argument.meta.get("val")
        for argument, said in zip(node.args, schema.arguments, strict=False)
        if said.alias_info is not None and isinstance(argument, torch.fx.Node)
    ]
    storages = {
        storage_of(tensor)
        for tensor in of
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    }
    strided = value.layout is torch.strided
    return bool(storages) and strided and storage_of(value) not in storages


def graph_is_kept() -> bool:
    """Whether the backward pass under way was asked to `retain_graph`.

    AOTAutograd asks the same way whether it may let go of what was saved.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def mutated_inputs(
    output: torch.fx.Node, inputs: Sequence[torch.fx.Node]
) -> Sequence[int]:
    """Inputs that AOTAutograd changes between the halves.

    Its descriptors of inputs and outputs tell; their classes are of a private module.
    """
    changed = [
        result.mutated_input
        for result in output.meta.get("desc", ())
        if isinstance(result, InputMutationAOTOutput)
    ]
    given = [node.meta.get("desc") for node in inputs]
    return [i for i, described in enumerate(given) if described in changed]


def written_back(output: torch.fx.Node) -> Sequence[int]:
    """Results that are new values of inputs.

    AOTAutograd copies them there behind the first half, and lets go of them.
    """
    described = enumerate(output.meta.get("desc", ()))
    return [i for i, d in described if isinstance(d, InputMutationAOTOutput)]


def breaks_of(module: torch.fx.GraphModule) -> tuple[str | None, bool]:
    """Where a break ends a graph that Dynamo captured, and whether one is before it.

    Dynamo leaves its reason to end a graph on the module, with the user's stack. Where
    it goes on behind a break is a function of its own making, known by its name. There
    is no public way to ask for either but `torch._dynamo.explain`, which runs a model.
    """
    stacks = (node.meta.get("stack_trace") or "" for node in module.graph.nodes)
    resumes = any("torch_dynamo_resume_in_" in stack for stack in stacks)
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None, resumes
    lines = [f"{f.filename}:{f.lineno}" for f in reason.user_stack]
    return (lines[-1] if lines else "a line that is not known"), resumes


def bucket_bytes(module: torch.fx.GraphModule) -> int | None:
    """Return the bytes of all tensors of a part that Dynamo's DDPOptimizer split off.

    It cuts the graph of a model in DistributedDataParallel at gradient buckets and has
    each part compiled on its own; what it writes as the reason tells. None for graphs
    that are no such part. Symbolic sizes count as they were when they were traced.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.reason.startswith("DDPOptimizer"):
        return None
    found = (node.meta.get("example_value") for node in module.graph.nodes)
    sizes = [v.numel() * v.itemsize for v in found if isinstance(v, torch.Tensor)]
    return sum(int(getattr(getattr(n, "node", None), "hint", n) or 0) for n in sizes)


def name_of_graph(module: torch.fx.GraphModule) -> tuple[str, str]:
    """Dynamo's number of the function that a graph is of, and of the graph, "0/1".

    They are those of `TORCH_LOGS=recompiles` and of `tlparse`.
    """
    number = module.meta.get("dynamo_compile_id")
    return ("", "") if number is None else (str(number).split("/")[0], str(number))


# Which versions of PyTorch this works with, and what each lacks.
#
# A version is called tested if the tests' quick part for PyTorch ran on it, whole or
# the tests of each face (`train_step`, `backend`, `convolutions`, `memory`), on a CPU.
# `TESTED` says what each lacks. Older ones than `OLDEST` lack names that are needed and
# are refused; newer ones than those tested are tried, with a warning.
