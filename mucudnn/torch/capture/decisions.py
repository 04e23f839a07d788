"""What Python decides by numbers that are there before a step.

`if step > 5` in an optimizer is decided when a step is captured, by what is there then.
Such a decision is kept with how its numbers follow from the step's inputs: before every
step it is asked whether it still holds. A number that only the step itself makes cannot
be decided by.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["DecidingShapes", "Decision", "all_hold"]

_ITEMS = frozenset({torch.ops.aten._local_scalar_dense.default})
"""Operations that make a number of a tensor's element: where symbols begin."""

_MOST_NODES = 32
"""Operations that a number may be away from the inputs it follows from."""


@dataclass(frozen=True)
class _Number:
    """A number as it follows from a step's inputs.

    Attributes:
        nodes: What computes it, in order; the last one gives it.
        inputs: Where its inputs are among the step's.
    """

    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[tuple[torch.fx.Node, int], ...]

    def of(self, given: Sequence[torch.Tensor]) -> Any:
        """Its value."""
        values: dict[torch.fx.Node, Any] = {n: given[at] for n, at in self.inputs}
        for node in self.nodes:
            args, kwargs = torch.fx.node.map_arg(
                (node.args, dict(node.kwargs)), values.__getitem__
            )
            function: Any = node.target
            values[node] = function(*args, **kwargs)
        found = values[self.nodes[-1]]
        return int(found) if isinstance(found, bool) else found  # as its symbol is


@dataclass(frozen=True)
class Decision:
    """A comparison of numbers, and how it came out.

    Attributes:
        expression: Of `numbers`, which are named by their places.
        numbers: How they follow from the step's inputs.
        outcome: What it was when the step was captured.
    """

    expression: Any
    numbers: tuple[_Number, ...] = field(repr=False)
    outcome: bool


def all_hold(decisions: Iterable[Decision], given: Sequence[torch.Tensor]) -> bool:
    """Whether everything would be decided as it was, for these inputs of a step."""
    known: dict[Any, bool] = {}  # parameters mostly have the same step
    for decision in decisions:
        values = tuple([number.of(given) for number in decision.numbers])
        key = decision.expression, values
        if key not in known:
            known[key] = _came_out(decision.expression, values)
        if known[key] != decision.outcome:
            return False
    return True


def _came_out(expression: Any, values: Sequence[Any]) -> bool:
    names = {_place(i): value for i, value in enumerate(values)}
    return bool(sympy_interp(PythonReferenceAnalysis, names, expression))


def _place(index: int) -> Any:
    return sympy.Symbol(f"n{index}", real=True)


class DecidingShapes(ShapeEnv):  # type: ignore[misc]  # PyTorch has no types here
    """Symbols of a capture; asked for the truth of numbers that are known, it decides.

    Args:
        names: Of the step's inputs, in the order of its placeholders.
        given: What they are now.
        fixed: Inputs that nothing is decided by.
    """

    def __init__(
        self,
        names: Sequence[str],
        given: Sequence[torch.Tensor],
        fixed: Collection[str],
    ) -> None:
        super().__init__()
        self.decisions: list[Decision] = []
        self._names = names
        self._given = given
        self._fixed = fixed

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a node: PyTorch's answer, or that of the inputs of now."""
        try:
            return super().evaluate_sym_node(sym_node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if sym_node.pytype is not bool:
                raise
            decided = self._decided(sym_node.expr)
            if decided is None:
                raise
            return sympy.true if decided else sympy.false

    def _decided(self, expression: Any) -> bool | None:
        symbols = sorted(expression.free_symbols, key=str)
        numbers = [self._number(symbol) for symbol in symbols]
        known = tuple(number for number in numbers if number is not None)
        if len(known) < len(symbols):
            return None
        names = {symbol: _place(i) for i, symbol in enumerate(symbols)}
        plain = expression.xreplace(names)
        with _disable_current_modes(), torch.no_grad():
            values = [number.of(self._given) for number in known]
        outcome = _came_out(plain, values)
        self.decisions.append(Decision(plain, known, outcome))
        return outcome

    def _number(self, symbol: Any) -> _Number | None:
        """How a symbol follows from the step's inputs; None if it does not."""
        mode = get_proxy_mode()
        graph = None if mode is None else mode.tracer.graph
        for node in () if graph is None else reversed(graph.nodes):
            if node.target in _ITEMS and symbol in _symbols(node):
                return self._traced(node)
        return None

    def _traced(self, last: torch.fx.Node) -> _Number | None:
        nodes: dict[torch.fx.Node, None] = {}
        inputs: dict[torch.fx.Node, int] = {}
        places = {n: i for i, n in enumerate(last.graph.find_nodes(op="placeholder"))}
        pending = [last]
        while pending:
            node = pending.pop()
            if node in places:
                if self._names[places[node]] in self._fixed:
                    return None
                inputs[node] = places[node]
            elif len(nodes) > _MOST_NODES or not _same_again(node):
                return None
            else:
                nodes.pop(node, None)  # the last of its uses counts
                nodes[node] = None
                pending += node.all_input_nodes
        return _Number(tuple(reversed(nodes)), tuple(inputs.items()))


def _same_again(node: torch.fx.Node) -> bool:
    """Whether a node gives the same for the same operands, and changes nothing."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags


def _symbols(node: torch.fx.Node) -> Collection[Any]:
    """Symbols in the number that a node gives."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr.free_symbols  # type: ignore[no-any-return]
    return ()
