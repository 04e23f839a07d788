"""What kernels return where PyTorch's own model of them says something else.

A graph is recorded on tensors without data, by PyTorch's model of every kernel. Some
models are wrong: under autocast, in types of what normalisations return; elsewhere in
strides. What follows is then recorded wrongly, too: casts that autograd makes by the
type it sees are missing. Measuring runs every kernel and sees it. So what it sees is
kept, and the step recorded once more, until no kernel differs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mucudnn.torch.lowering.lowered import Layout
from mucudnn.torch.lowering.statistics import corrected, statistics_types
from mucudnn.torch.measurement.refusals import WrongResultsError
from mucudnn.torch.storages import storage_of

__all__ = ["KernelResults"]

Results = Mapping[int | None, Layout]


class _HasModule(Protocol):
    @property
    def module(self) -> torch.fx.GraphModule: ...


CapturedT = TypeVar("CapturedT", bound=_HasModule)
ResultT = TypeVar("ResultT")


class KernelResults:
    """What was seen, by operation and how its operands lie."""

    def __init__(self) -> None:
        self._seen: dict[Any, dict[str, Results]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    def settled(
        self, capture: Callable[[], CapturedT], use: Callable[[CapturedT], ResultT]
    ) -> ResultT:
        """What is made of a graph, which is captured again while it is wrong.

        Args:
            capture: Records a graph, by these results.
            use: Makes something of it, and measures it for that.

        Raises:
            UnsupportedError: It stays wrong; says which operation.
        """
        while True:
            captured = capture()
            try:
                return use(captured)
            except WrongResultsError as e:
                if not self.learn(captured.module, e):
                    raise

    def learn(self, module: torch.fx.GraphModule, wrong: WrongResultsError) -> bool:
        """Keep what a measurement has seen; whether anything of it is new."""
        before = len(self)
        for node in module.graph.nodes:
            if (found := wrong.found.get(node.name)) is not None:
                seen = self._seen.setdefault(node.target, {})
                key = _key(node.args, node.kwargs)
                seen[key] = {**seen.get(key, {}), **found}
        return len(self) > before

    def corrected(
        self,
        mode: FakeTensorMode,
        function: Any,
        given: tuple[Any, Mapping[str, Any]],
        results: Any,
    ) -> Any:
        """Results without data as a kernel really gives them.

        Args:
            mode: Makes tensors without data.
            function: The operation.
            given: Its arguments, by place and by name.
            results: What PyTorch's model says.
        """
        with mode:
            results = corrected(results, statistics_types(function, given[0]))
            if function is torch.ops.aten.mkldnn_rnn_layer_backward.default:
                results = _apart(results)
        seen = self._seen.get(function)
        if seen is None or (layouts := seen.get(_key(*given))) is None:
            return results
        with mode:
            if isinstance(results, torch.Tensor):
                return _lying(layouts[None])
            return type(results)(
                [
                    _lying(layouts[k]) if k in layouts else value
                    for k, value in enumerate(results)
                ]
            )


def _apart(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The model of an LSTM's gradients has those of both biases as one tensor."""
    places = list(map(storage_of, results))
    return tuple(
        torch.empty_like(t) if place in places[:i] else t
        for i, (t, place) in enumerate(zip(results, places, strict=True))
    )


def _lying(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Equal for calls whose operands are of the same types and lie alike."""
    return repr([_said(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs))])


def _said(leaf: Any) -> Any:
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value)
    return value
