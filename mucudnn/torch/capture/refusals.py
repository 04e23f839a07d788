"""Refuse operations that cannot be captured, naming the operation and the user's line.

Operations are checked as the model calls them. Most refused operations would compute
something else in later steps than in the captured one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    disable_functional_mode,
)
from torch.distributions import constraints
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.guards import extent_of
from mucudnn.torch.capture.known_values import KnownShapes, of_known_shape
from mucudnn.torch.capture.many_tensor_updates import FUSED, record_fused
from mucudnn.torch.capture.op_overrides import CountedAverages
from mucudnn.torch.capture.reads import ReadRecorder, UnsoundCaptureError
from mucudnn.torch.capture.repeated_calls import RepeatedCalls
from mucudnn.torch.capture.undeclared_writes import (
    arguments_by_name,
    in_place_on_copy,
    recorded_call,
    rounds_in_place,
    writes_of,
)
from mucudnn.torch.distributed.sharding import is_own_collective
from mucudnn.torch.lowering.lower import CHECKS, DENSE
from mucudnn.torch.lowering.lowered import leaves_of
from mucudnn.torch.source_lines import (
    is_library_file,
    is_raised_by_user,
    line_now,
    line_of_traceback,
    storage_of,
)

_NAMESPACES = {
    "c10d": "a collective of torch.distributed",
    "_c10d_functional": "a collective of torch.distributed",
    "_c10d_functional_autograd": "a collective of torch.distributed",
    "quantized": "an operation on quantized tensors",
    "quantized_decomposed": "an operation on quantized tensors",
}
"""Namespaces whose operations are not captured -> the reason."""

_QUANTIZING = ("quantize_per", "int_repr", "dequantize", "_empty_affine", "q_scale")
_SPARSE = ("_to_sparse", "to_sparse", "sparse_", "_sparse_coo", "_sparse_csr")
_KINDS = (
    (
        _QUANTIZING,
        "quantized tensors are not captured; use torch.ao's fake quantization",
    ),
    (("_nested_",), "nested tensors are not captured; use padding and a mask"),
    (_SPARSE, f"sparse tensors are not captured; {DENSE}"),
)
"""Prefixes of names, and the reason to refuse them."""

_VALUES = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Functions that pass run-time values to Python."""

_SUMS = {
    torch.ops.aten.sub.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.sub_.Tensor: torch.ops.aten.add_.Tensor,
}
"""Differences -> sums, whose kernels compute both."""

_RANDOM_FROM = getattr(torch.ops.aten.random_, "from")
"""An operator whose functional form has a name that Python code cannot contain."""

_SET_DATA = torch.Tensor.data.__set__

_UNKNOWN = {
    torch.Tensor._base.__get__: "_base",
    torch.Tensor._version.__get__: "_version",
    torch.Tensor.retains_grad.__get__: "retains_grad",
    torch.Tensor.is_pinned: "is_pinned",
    torch.Tensor.is_set_to: "is_set_to",
    torch.Tensor.is_shared: "is_shared",
    torch.Tensor.storage: "storage",
    torch.Tensor.storage_offset: "storage_offset",
    torch.Tensor.untyped_storage: "untyped_storage",
}
"""What stands in for a tensor while a step is captured cannot tell."""

_SYMBOLS = torch.SymFloat, torch.SymInt, torch.SymBool

_GRAD = torch.Tensor.grad.__get__

_METHODS = {torch._tensor.__file__, torch.overrides.__file__}
"""Files of methods of tensors that are written in Python."""

_DATA_DEPENDENT = (
    "its output shape depends on data; keep the shape fixed, with torch.where or by "
    "multiplying with a mask, or index by a mask that is computed from the batch and "
    "buffers"
)


_OUTSIDE = "a distribution was given a value outside of what it takes"


class RefusedOperations(TorchDispatchMode):  # type: ignore[misc]  # no types here
    """Checks every operation before it is recorded.

    Args:
        recorder: Notes what gradients of users' operations read.
        shapes: Values that the batch determines.
        calls: Records operations that were called before.
        as_compiled: Whether operations are those that `torch.compile` traces.
    """

    supports_higher_order_operators = True  # so that they are refused here

    def __init__(
        self,
        recorder: ReadRecorder,
        shapes: KnownShapes,
        calls: RepeatedCalls,
        *,
        as_compiled: bool,
    ) -> None:
        super().__init__()
        self._as_compiled = as_compiled
        self._state = torch.default_generator.get_state()
        self._shapes = shapes
        self._calls = calls
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operation, or refuse it."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise UnsupportedError(
                f"the step calls {func.name()}{line_now()}, a higher-order operation, "
                "which is not captured; compute all branches and select with "
                "torch.where, or write loops and attention in ordinary operations"
            )
        reason = self._reason(func, args, kwargs)
        if reason is not None:
            raise UnsupportedError(f"the step calls {func}{line_now()}: {reason}")
        if _draws_in_other_order(func, args, kwargs):
            raise UnsoundCaptureError(
                f"the step calls {func}{line_now()}: it draws numbers in an order that "
                "depends on strides, which planned steps do not keep; draw a whole "
                "tensor, and copy it"
            )
        func, args, kwargs = of_known_shape(self._shapes, func, args, kwargs)
        if func is _RANDOM_FROM:
            return args[0].copy_(in_place_on_copy(func)(*args, **kwargs))
        if calls := _calls_in_turn(func, args, kwargs):
            for call in calls:
                call()
            return None
        if func in _SUMS and isinstance(kwargs.get("alpha"), torch.SymFloat):
            # PyTorch's model of a difference asks whether its factor is 1.
            func, kwargs = _SUMS[func], {**kwargs, "alpha": -kwargs["alpha"]}
        if (known := self._shapes.tensors(func, args, kwargs)) is not None:
            return known
        if func is torch.ops.aten.equal.default and args[0].shape == args[1].shape:
            with self:  # so that the value may be known
                return bool((args[0] == args[1]).all())
        if func.namespace not in ("aten", "prims"):
            self._recorder.take_operation(func._schema.name)
        if func in CHECKS:
            return _recorded_check(func, args, kwargs)
        if func is torch.ops.aten.bernoulli.p:
            plain = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            return plain.bernoulli_(args[1])
        leaves = leaves_of(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outside = [t for t in given if not isinstance(t, FunctionalTensor)]
        if (
            outside
            and len(outside) == len(given)
            and not any(a.alias_info is not None for a in func._schema.arguments)
        ):
            # The results belong to the step, which may write them.
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, _functional_constant, (args, kwargs)
            )
        if (rounded := rounds_in_place(func, args)) and not self._as_compiled:
            return args[0].copy_(in_place_on_copy(rounded)(*args, **kwargs))
        if writes_of(func, args, kwargs) and not func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            found = recorded_call(func, args, kwargs)
        else:
            found = self._calls.operation(func, args, kwargs)
        for result in found if isinstance(found, tuple | list) else (found,):
            if isinstance(result, torch.Tensor) and (reason := _laid_out(result)):
                raise UnsupportedError(f"the step calls {func}{line_now()}: {reason}")
            if outside and isinstance(result, FunctionalTensor):
                mode: Any = get_proxy_mode()
                if mode is None:
                    raise UnsoundCaptureError(
                        f"the step captures operations itself{line_now()}, as "
                        "torch.export does; do so outside the step"
                    )
                # PyTorch would take the present values of outside tensors for constant.
                get_proxy_slot(from_fun(result), mode.tracer).constant = None
        if func is torch.ops.aten._local_scalar_dense.default:
            last = next(reversed(self._calls.tracer.graph.nodes))
            if last.target is func:
                last.meta["line"] = line_now()  # for the reason not to compile
        return found

    def _reason(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        if (reason := _NAMESPACES.get(func.namespace)) is not None:
            return None if is_own_collective() else reason
        if func._schema.is_mutable and _writes_elsewhere(func, args, kwargs):
            return (
                "it modifies a tensor that is not a parameter or buffer of the "
                "model; register it (register_buffer)"
            )
        name = func._schema.name.partition("::")[2]
        for beginnings, reason in _KINDS:
            if name.startswith(beginnings):
                return reason
        if torch.Tag.nondeterministic_seeded in func.tags:
            if kwargs.get("generator") is not None:
                return (
                    "it uses its own random generator; only PyTorch's default "
                    "generator draws new numbers in every step"
                )
            now = torch.default_generator.get_state()
            if not torch.equal(self._state, now):
                return (
                    "the step sets the state of PyTorch's generator before it; call "
                    "torch.manual_seed outside the step"
                )
        if kwargs.get("layout") not in (None, torch.strided):
            return f"{kwargs['layout']} is not captured; use dense tensors"
        return None


def _draws_in_other_order(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether numbers are drawn into memory that is dense in the graph only."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if (out := kwargs.get("out")) is not None:
        return not out.is_contiguous()
    # Kernels draw at least 16 normal numbers of dense memory at once.
    return (
        func is torch.ops.aten.normal_.default
        and args[0].numel() >= 16
        and extent_of(args[0]) > args[0].nbytes
    )


def _calls_in_turn(func: Any, args: Any, kwargs: Any) -> list[Callable[[], Any]]:
    """Return one call for each tensor of a `_foreach_*_` that reads what it writes.

    The functional form would read values from before the whole call. Empty if the call
    has each tensor once.
    """
    schema = func._schema
    if not schema.is_mutable or not schema.name.startswith("aten::_foreach_"):
        return []
    leaves = leaves_of(args, kwargs)
    mine = [t.elem for t in leaves if isinstance(t, FunctionalTensor)]
    if len(set(map(storage_of, mine))) == len(mine):
        return []

    def call(i: int) -> Callable[[], Any]:
        def one(value: Any) -> Any:
            return value[i : i + 1] if isinstance(value, list | tuple) else value

        options = {name: one(value) for name, value in kwargs.items()}
        return partial(func, *map(one, args), **options)

    return [call(i) for i in range(len(args[0]))]


def _functional_constant(tensor: torch.Tensor) -> Any:
    """Return a tensor from outside of the step for functionalization.

    PyTorch's tracer refuses trained tensors that it does not know.
    """
    if tensor.requires_grad:
        with _disable_current_modes():
            tensor = tensor.detach()
    return to_fun(tensor)


def _recorded_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an operation that only raises, without effect tokens.

    PyTorch would add tokens to the graph to keep its position.
    """
    plain = [from_fun(a) if isinstance(a, torch.Tensor) else a for a in args]
    with disable_functional_mode():
        return func(*plain, **kwargs)


def _writes_elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation writes a tensor from outside of the step."""
    given = arguments_by_name(func, args, kwargs)
    written = [
        given.get(a.name)
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return any(
        isinstance(t, torch.Tensor) and not isinstance(t, FunctionalTensor)
        for t in pytree.tree_leaves(written)
    )


def _laid_out(result: torch.Tensor) -> str | None:
    """Return the reason why a result cannot be planned; None if it can."""
    if result.layout is not torch.strided:
        return f"its result is {result.layout}; {DENSE}"
    if any(not isinstance(size, int) for size in result.shape):
        return _DATA_DEPENDENT
    return None


class StepFunctions(TorchFunctionMode):  # type: ignore[misc]  # no types here
    """Functions of PyTorch that are captured in another way than they are run.

    Args:
        averages: The batch norms with cumulative averages.
        recorder: Notes the values that Python asks for.
        shapes: Decides what PyTorch's own code asks.

    Attributes:
        stand_ins: Tensors of the capture, by the identity of the parameter or buffer
            that each replaces: a user's function may hold these themselves.
        batch: Identities of the tensors of the batch, whose gradients are unknown.
    """

    def __init__(
        self, averages: CountedAverages, recorder: ReadRecorder, shapes: KnownShapes
    ) -> None:
        super().__init__()
        self._averages = averages
        self._recorder = recorder
        self._shapes = shapes
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.batch: frozenset[int] = frozenset()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or its replacement."""
        kwargs = kwargs or {}
        if self._recorder.is_computing:
            return func(*args, **kwargs)
        if kwargs.get("generator") is torch.default_generator:
            kwargs = {**kwargs, "generator": None}
        if any(id(v) in self.stand_ins for v in leaves_of(args, kwargs)):
            found = self.stand_ins
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: found.get(id(t), t), (args, kwargs)
            )
            if func is torch.Tensor.__eq__ and args[0] is args[1]:
                return True  # a set, dict or list compares a parameter with itself
        if func is torch.as_tensor and args and isinstance(args[0], torch.SymFloat):
            kwargs = {"dtype": torch.get_default_dtype(), **kwargs}
            return torch.scalar_tensor(args[0], **kwargs)
        if func is functional.batch_norm:
            return func(*args, **self._averages.called(kwargs))
        # By these, distributions check their arguments, and branch on the result.
        if func is torch._is_all_true or (
            func is torch.Tensor.all
            and len(args) + len(kwargs) == 1
            and sys._getframe(1).f_globals is vars(constraints)
        ):
            torch._assert_async(args[0].all(), _OUTSIDE)
            return True
        if func is functional.gaussian_nll_loss:
            return self._gaussian_loss(*args, **kwargs)
        if func in (functional.ctc_loss, torch.ctc_loss):
            # PyTorch would turn numbers into tensors by writes in place.
            lengths = map(torch.as_tensor, args[2:4])
            return func(*args[:2], *lengths, *args[4:], **kwargs)
        if func == _SET_DATA:
            raise UnsoundCaptureError(
                f"the step assigns to .data of a tensor{line_now()}; modify the "
                "tensor in place, within torch.no_grad()"
            )
        if func is torch.Tensor.retain_grad and _is_asked_by_user(sys._getframe(1)):
            raise UnsoundCaptureError(
                f"the step calls retain_grad(){line_now()}, but planned steps keep no "
                "gradient of a result; store what is needed of it by a hook "
                "(register_hook)"
            )
        if func in FUSED:
            return record_fused(func, args, kwargs)
        if func is torch._foreach_add_ and not isinstance(args[1], list | tuple):
            # Steps of fused optimizers.
            return [tensor.add_(*args[1:], **kwargs) for tensor in args[0]]
        if func in _VALUES:
            raise UnsupportedError(
                f"the step calls {func.__name__}{line_now()}: it passes tensor values "
                "to Python, which are unknown during capture; keep them in tensors"
            )
        asked = _UNKNOWN.get(func)
        if func == _GRAD and id(args[0]) in self.batch:
            asked = "grad"
        if asked and _is_asked_by_user(sys._getframe(1)):
            raise UnsoundCaptureError(
                f"the step asks a tensor for {asked!r}{line_now()}, which is unknown "
                "during capture; ask for it outside the step"
            )
        result = func(*args, **kwargs)
        if isinstance(result, _SYMBOLS) and _is_asked_by_user(sys._getframe(1)):
            self._recorder.has_numbers = True
        if (
            args
            and type(args[0]) is torch.Tensor
            and not torch._is_functional_tensor(args[0])
        ):
            self._recorder.asked(func, args[0], result)
        return result

    def _gaussian_loss(
        self, input: Any, target: Any, var: Any, *more: Any, **options: Any
    ) -> Any:
        """Call `gaussian_nll_loss`, whose check of variances becomes an operation."""
        if isinstance(var, torch.Tensor):
            is_fine = torch.logical_not(torch.any(var < 0))
            torch._assert_async(is_fine, "var has negative entry/entries")
        self._shapes.outcome = sympy.false  # of the check in Python
        try:
            return functional.gaussian_nll_loss(input, target, var, *more, **options)
        finally:
            self._shapes.outcome = None


_WITHOUT_DATA = (
    "Expected scalars to be on CPU",
    "on unresolved conjugated tensors",
    "!this_view_meta->has_fw_view()",
    ".numpy() is not supported for tensor subclasses",  # in a backward pass
    "is not tracked with proxy for",  # of nested tensors
    "running_mean is None, but running_var is provided",
    "sympy expression is NaN",  # of an infinite number and one of a tensor
)
"""What PyTorch's errors say of calls that work on tensors with data only."""


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Return whether a user's code calls a method, which may be written in Python."""
    while frame is not None and frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)


def _branching(error: Exception) -> UnsupportedError:
    """Return the error of a step that asks for a value known only at run time."""
    return UnsupportedError(
        "the step branches on the value of a "
        f"tensor{line_of_traceback(error.__traceback__)}; use torch.where, keep "
        "numbers in tensors (no float() of them), write a check as "
        "torch._assert_async, or branch outside the step"
    )


@contextmanager
def saying_where() -> Iterator[None]:
    """Turn PyTorch's errors about data dependence into errors with the user's line.

    Raises:
        UnsupportedError: The step depends on values that are known only at run time.
    """
    try:
        yield
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as e:
        raise _branching(e) from e
    except (DynamicOutputShapeException, UnsupportedOperatorException) as e:
        reason = (
            _DATA_DEPENDENT
            if isinstance(e, DynamicOutputShapeException)
            else "PyTorch cannot infer its output shape without running it"
        )
        raise UnsupportedError(
            f"the step calls {e.func}{line_of_traceback(e.__traceback__)}: {reason}"
        ) from e
    except (RuntimeError, AssertionError, TypeError, ZeroDivisionError) as e:
        if GuardOnDataDependentSymNode.__name__ in str(e):  # in TorchScript
            raise _branching(e) from e
        if isinstance(e, NotImplementedError) and "rule registered for H" in str(e):
            raise UnsupportedError(
                f"the step calls a Triton kernel{line_of_traceback(e.__traceback__)} "
                "or an operation that modifies its operands (mutates_args); return new "
                "tensors, by torch.library.custom_op, register_fake, register_autograd"
            ) from e
        own = NotImplementedError, ZeroDivisionError  # of PyTorch's models of kernels
        missing = isinstance(e, own) and not is_raised_by_user(e)
        if missing or any(text in str(e) for text in _WITHOUT_DATA):
            raise UnsoundCaptureError(
                "the step makes a call that cannot be "
                f"captured{line_of_traceback(e.__traceback__)}: {e}; make it outside "
                "the step"
            ) from e
        if "FunctionalTensor" in str(e) or "functional_mode" in str(e):
            raise UnsoundCaptureError(
                "the step computes where it cannot be "
                f"captured{line_of_traceback(e.__traceback__)}, as a tensor subclass "
                "or another thread may; use plain tensors in the thread of the step"
            ) from e
        if "data is not allocated yet" not in str(e):
            raise
        raise UnsupportedError(
            "the step calls a kernel whose output shape depends on "
            f"data{line_of_traceback(e.__traceback__)}; call it outside the step"
        ) from e
