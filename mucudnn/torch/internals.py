"""All uses of PyTorch's private names.

Each function wraps one use, and says which public interface is missing. Public are
`torch.compile` itself, `torch.fx` and `torch.compiler.disable`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._guards import detect_fake_mode
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._symbolic_trace import _wrapped_fns_to_patch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import _side_effectful_functions
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.torch.execution.devices import autocast_off, forked_generators
from mucudnn.torch.source_lines import storage_of

_CHECK = torch.ops.aten._linalg_check_errors.default


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module, a class or an object other values in this context.

    PyTorch has no public way to choose another function for a while.
    """
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)


def aot_compiled(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    compiled: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    *,
    static: bool,
) -> Callable[..., Any]:
    """Compile the forward and backward of a captured graph by AOTAutograd.

    PyTorch's guide to backends names `aot_autograd`; its `partition_fn`, which takes
    the joint graph of both halves, is documented only in the source. With
    `static`, numbers among the inputs are constants of the graph.
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
    """Keep operations that only raise in traced graphs, without effect tokens.

    AOTAutograd would add tokens to the inputs and results of both halves; there is no
    public way to keep an operation without them, nor to mark an operation without used
    results as needed for a while.
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
def without_wrapped_functions() -> Iterator[None]:
    """Trace through functions marked by `torch.fx.wrap`; a trace replaces them else.

    `make_fx` records below them in any case, but a capture would find that globals of
    their modules change. There is no public way to leave them alone for one trace.
    """
    kept = _wrapped_fns_to_patch.copy()
    _wrapped_fns_to_patch.clear()
    try:
        yield
    finally:
        _wrapped_fns_to_patch.update(kept)


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Compute on real tensors, without gradients or autocast, while a graph is traced.

    Fake tensors are made by a dispatch mode; there is no public way to suspend it.
    Autocast is off because casts are in the graph.
    """
    with _disable_current_modes(), torch.no_grad(), autocast_off():
        yield


@contextmanager
def while_compiling(given: Sequence[Any]) -> Iterator[None]:
    """Hold Dynamo's lock, without the user's dispatch modes, with forked generators.

    There is no public way to compile a captured graph once more. Nor is there one to
    tell PyTorch that a compilation is going on: without it, compiled functions that
    other threads call meanwhile would refuse to be traced.
    """
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)
    with compile_lock, session(), _disable_current_modes(), forked_generators(given):
        yield


@contextmanager
def kernels_corrected(
    inputs: Sequence[Any], correct: Callable[[Any, Any, Any, Any], Any]
) -> Iterator[None]:
    """Correct the fake results of PyTorch's models of its kernels.

    Dynamo creates the fake mode, and AOTAutograd traces with it; neither lets a backend
    choose another.
    `correct` takes the mode, an operation, its arguments and the model's result.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    dispatch = mode.dispatch

    def corrected(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = dispatch(func, types, args, kwargs)
        return correct(mode, func, (args, kwargs or {}), found)

    with replaced(mode, dispatch=corrected):
        yield


def examples_of(given: Sequence[Any]) -> list[Any]:
    """Return fake tensors like the given ones, with static sizes.

    Tracing itself makes them from real tensors, but without a shape environment, which
    Python numbers that come from tensors need.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return [
        mode.from_tensor(value, static_shapes=True)
        if isinstance(value, torch.Tensor)
        else value
        for value in given
    ]


def break_reasons() -> dict[str, int]:
    """Return Dynamo's reasons for graph breaks, a line each, with their counts.

    PyTorch's guide to graph breaks names these counters; they are nowhere else, and
    `torch._dynamo.reset` leaves them.
    """
    found: dict[str, int] = {}
    for kind in ("graph_break", "unimplemented"):
        for reason, count in counters[kind].items():
            line = " ".join(str(reason).partition("\n")[0].split()).rstrip(".")
            found[line] = found.get(line, 0) + count
    return found


def fresh_fake(like: FakeTensor, shape: Sequence[int] | None = None) -> FakeTensor:
    """Return a fake tensor like another, with its own storage.

    It is contiguous if it is given another shape.

    PyTorch's public functions would dispatch, which takes ten times as long.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made = torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device="meta"
        )
        if shape is not None:
            made = made.new_empty(shape)
        return FakeTensor(like.fake_mode, made, like.device)


def view_of_fake(base: FakeTensor, like: FakeTensor) -> FakeTensor:
    """Return a view of the storage of a fake tensor, of the layout of another."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made = torch.empty((0,), dtype=like.dtype, device="meta").set_(
            base.untyped_storage(), like.storage_offset(), like.shape, like.stride()
        )
        return FakeTensor(base.fake_mode, made, like.device)


def refresh_values(module: torch.fx.GraphModule) -> None:
    """Recompute fake values of a joint graph whose storages are not as in every run.

    Dynamo turns Python numbers that change from call to call into tensors, without
    updating the values of the nodes computed from them. Tangents of results that share
    memory have one fake storage, but are different tensors; inputs that are the same
    tensor in the first run may be different ones later.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    seen: set[Any] = set()
    shared = False
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            layout = value.shape, value.stride(), value.storage_offset()
            place = storage_of(value), () if "tangents" in node.name else layout
            if place in seen:
                shared = True
                size = value.untyped_storage().nbytes() // value.itemsize
                node.meta["val"] = value.new_empty(size).as_strided(*layout)
            seen.add(place)
    if shared or any(map(_is_stale_view, module.graph.nodes)):
        given = [node.meta.get("val") for node in nodes]
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
        for argument, declared in zip(node.args, schema.arguments, strict=False)
        if declared.alias_info is not None and isinstance(argument, torch.fx.Node)
    ]
    storages = {
        storage_of(tensor)
        for tensor in of
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    }
    strided = value.layout is torch.strided
    return bool(storages) and strided and storage_of(value) not in storages


def graph_is_kept() -> bool:
    """Return whether the current backward pass was called with `retain_graph`.

    AOTAutograd decides in the same way whether it may release saved tensors.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def mutated_inputs(
    output: torch.fx.Node, inputs: Sequence[torch.fx.Node]
) -> Sequence[int]:
    """Return the inputs that AOTAutograd changes between the halves.

    They are found by its descriptors, whose classes are in a private module.
    """
    changed = [
        result.mutated_input
        for result in output.meta.get("desc", ())
        if isinstance(result, InputMutationAOTOutput)
    ]
    given = [node.meta.get("desc") for node in inputs]
    return [i for i, described in enumerate(given) if described in changed]


def written_back(output: torch.fx.Node) -> Sequence[int]:
    """Return the results that are new values of inputs.

    AOTAutograd copies them to the inputs behind the first half, and releases them.
    """
    described = enumerate(output.meta.get("desc", ()))
    return [i for i, d in described if isinstance(d, InputMutationAOTOutput)]


def breaks_of(module: torch.fx.GraphModule) -> tuple[str | None, bool]:
    """Return the line of a graph break behind a graph, and whether one is before it.

    Dynamo stores its reason to end a graph on the module, with the user's stack. The
    code behind a break is a function of its own making, recognized by its name. The
    only public way to ask for either is `torch._dynamo.explain`, which runs the model.
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

    It cuts the graph of a model in DistributedDataParallel at gradient buckets and
    compiles each part on its own, which only the reason that it writes tells. None for
    other graphs. Symbolic sizes count with the value that they were traced with.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.reason.startswith("DDPOptimizer"):
        return None
    found = (node.meta.get("example_value") for node in module.graph.nodes)
    sizes = [v.numel() * v.itemsize for v in found if isinstance(v, torch.Tensor)]
    return sum(int(getattr(getattr(n, "node", None), "hint", n) or 0) for n in sizes)


_BACKENDS = ("generic", "cuda", "cuda", "cuda", "mkldnn", "mkldnn", "mkldnn")
_PRODUCTS = ("all", "matmul", "conv", "rnn", "matmul", "conv", "rnn")


def float32_precisions() -> str:
    """Return how float32 products are computed, by every setting that decides it.

    PyTorch has two interfaces of these settings. Reading the older one raises where the
    newer one was used, and the public newer one has no way to ask for all backends.
    """
    try:
        older = str(torch._C._get_float32_matmul_precision())
    except RuntimeError:
        older = ""
    read = torch._C._get_fp32_precision_getter
    return "/".join((older, *map(read, _BACKENDS, _PRODUCTS)))


def allows_tf32(products: Literal["conv", "matmul"]) -> bool:
    """Return whether CUDA may compute float32 products with TF32's short factors.

    Read as in `float32_precisions`: the older interface raises after the newer one.
    """
    return bool(torch._C._get_fp32_precision_getter("cuda", products) == "tf32")


def allocations_of(
    call: Callable[[], object], device: torch.device
) -> list[tuple[int, int]]:
    """Return what a call allocates and frees on a CUDA device, in order.

    Returns:
        Addresses and bytes, 0 of what is freed; nothing where the user has the history
        of the allocator recorded, which is left alone.
    """
    if torch._C._cuda_isHistoryEnabled():
        return []
    record = torch.cuda.memory._record_memory_history
    record("all", context=None)
    try:
        result = call()
        events = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    finally:
        record(None)
    del result
    sizes = {"alloc": 1, "free_requested": 0}
    return [
        (event["addr"], event["size"] * sizes[event["action"]])
        for event in events
        if event["action"] in sizes
    ]


def name_of_graph(module: torch.fx.GraphModule) -> tuple[str, str]:
    """Return Dynamo's number of a graph's function, and of the graph, as in "0/1".

    `TORCH_LOGS=recompiles` and `tlparse` show the same numbers.
    """
    number = module.meta.get("dynamo_compile_id")
    return ("", "") if number is None else (str(number).split("/")[0], str(number))
