"""A graph rewritten so that it can be cut: the same values by other operations.

What is filled with a constant reads nothing, though PyTorch gives it a tensor to be
like. A classes' loss divides by the whole batch's count: that is counted first, from
labels alone; the loss is summed; the sum is divided.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.ir.traits import PLAIN
from mucudnn.torch.lowering.lowered import Call, Lowered, Operand
from mucudnn.torch.splitting.losses import MEAN, SUM, nll_counted
from mucudnn.torch.splitting.rewriting import Rewriting

__all__ = ["prepared"]

_FILLED: Mapping[str, Callable[[tuple[Any, ...]], Any]] = MappingProxyType(
    {
        "aten.ones_like.default": lambda args: 1,
        "aten.zeros_like.default": lambda args: 0,
        "aten.full_like.default": lambda args: args[1],
        "aten.new_zeros.default": lambda args: 0,
        "aten.new_ones.default": lambda args: 1,
        "aten.new_full.default": lambda args: args[2],
    }
)
"""Operation -> what it fills a tensor with."""

_UNFILLED = frozenset({"aten.empty_like.default", "aten.new_empty.default"})


def prepared(lowered: Lowered) -> Lowered:
    """The same step, ready to be cut."""
    return _Writer(lowered).rewritten()


class _Writer(Rewriting):
    def write(self, node: Node) -> None:
        """A node, or what is in its place."""
        call = self.calls[node.name]
        if node.op in nll_counted and _mean_of(call) and call.results[:1] == (0,):
            self._loss(node, call)
        elif (node.op in _FILLED or node.op in _UNFILLED) and self._dense(node):
            self.calls[node.name] = self._filled(node, call)
            self.nodes.append(replace(node, inputs=()))
        else:
            self.nodes.append(node)

    def _dense(self, node: Node) -> bool:
        layout = self.layouts[node.outputs[0]]
        plain = torch.empty(layout.shape, device="meta").stride()
        leaves = [*self.calls[node.name].args[1:]]
        return layout.stride == tuple(plain) and not any(map(_is_tensor, leaves))

    def _filled(self, node: Node, call: Call) -> Call:
        layout = self.layouts[node.outputs[0]]
        kind = {"dtype": layout.dtype, "device": layout.device}
        sizes = list(layout.shape)
        if node.op in _UNFILLED:
            function: Any = torch.ops.aten.empty.memory_format
            return Call(function, (sizes,), kind, (None,))
        value = _FILLED[node.op](call.args)
        return Call(torch.ops.aten.full.default, (sizes, value), kind, (None,))

    def _loss(self, node: Node, call: Call) -> None:
        """A mean over the labels that count."""
        scores, labels, weights, _, ignored = (*call.args, -100)[:5]
        loss = node.outputs[0]
        count, total = f"{node.name}:count", f"{node.name}:sum"
        if len(node.outputs) > 1:
            count = node.outputs[1]
        else:
            self._declare(count, loss)
        self._declare(total, loss)
        dtype = self.layouts[loss].dtype
        read = [node.inputs[a.index] for a in (labels, weights) if _is_tensor(a)]
        given = [Operand(0), Operand(1) if _is_tensor(weights) else None]
        counted = Call(_counted, (*given, ignored, dtype), {}, (None,))
        self._add(node, "count", counted, tuple(read), count)
        args = (scores, labels, weights, SUM, ignored)
        self._add(
            node, "sums", replace(call, args=args, results=(0,)), node.inputs, total
        )
        divided = Call(torch.ops.aten.div.Tensor, (Operand(0), Operand(1)), {}, (None,))
        self._add(node, "mean", divided, (total, count), loss)

    def _declare(self, name: str, like: str) -> None:
        layout = self.layouts[like]
        self.tensors[name] = replace(
            self.tensors[like],
            name=name,
            alias=None,
            shape=(layout.dtype.itemsize,),
        )
        self.layouts[name] = replace(layout, offset=0)

    def _add(
        self, node: Node, what: str, call: Call, inputs: tuple[str, ...], output: str
    ) -> None:
        name = f"{node.name}:{what}"
        self.calls[name] = call
        op = node.op if what == "sums" else f"{node.op}:{what}"
        self.nodes.append(
            Node(name, op, inputs, (output,), phase=node.phase, traits=PLAIN)
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Operand)


def _mean_of(call: Call) -> bool:
    return call.args[3:4] in ((), (MEAN,)) and not call.kwargs


def _counted(
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    ignored: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """How many labels count, or what they weigh."""
    counts = labels != ignored
    if weights is None:
        return counts.sum().to(dtype)
    known = torch.where(counts, labels, 0)
    return torch.where(counts, weights[known], 0).sum()
