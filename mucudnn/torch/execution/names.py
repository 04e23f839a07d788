"""What a program calls its tensors and its constants.

Every tensor is a local variable, which keeps its name for good: what was freed and is
there again is the same one. Values that Python cannot write down are globals.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mucudnn.ir.graph import Graph
from mucudnn.torch.lowering.lowered import Number, Operand

__all__ = ["Names"]

_WRITTEN = (int, bool, str, type(None))


class Names:
    """The names of one program.

    Args:
        graph: Whose tensors it has.
        space: Global name -> value, to begin with.

    Attributes:
        space: All of them.
        bound: Tensors whose variables have a value at this point of the program.
    """

    def __init__(self, graph: Graph, space: Mapping[str, Any]) -> None:
        self.space: dict[str, Any] = dict(space)
        self.bound: set[str] = set()
        self._graph = graph
        self._variables: dict[str, str] = {}
        self._constants: dict[int, str] = {}

    @cached_property
    def _members(self) -> Mapping[str, list[str]]:
        """Storage -> all names of its bytes."""
        found: dict[str, list[str]] = {}
        for name, storage in self._graph.storages.items():
            found.setdefault(storage, []).append(name)
        return found

    def variable(self, tensor: str) -> str:
        """The local variable of a tensor, which is there from now on."""
        self.bound.add(tensor)
        return self._variables.setdefault(tensor, f"t{len(self._variables)}")

    def any_of(self, storage: str) -> str:
        """The variable of some tensor that is there and has these bytes."""
        name = next(n for n in self._members[storage] if n in self.bound)
        return self._variables[name]

    def has(self, storage: str) -> bool:
        """Whether any tensor that is there has these bytes."""
        return not self.bound.isdisjoint(self._members[storage])

    def known(self, storage: str) -> list[str]:
        """Tensors with these bytes that have been there."""
        return [n for n in self._members[storage] if n in self._variables]

    def released(self, storage: str) -> list[str]:
        """Variables that have these bytes; their tensors are no longer there."""
        names = [n for n in self._members[storage] if n in self.bound]
        self.bound.difference_update(names)
        return [self._variables[name] for name in names]

    def argument(self, value: Any, operands: Sequence[str]) -> str:
        """An argument of a call as text, given its operands'."""
        match value:
            case Operand(index):
                return operands[index]
            case Number(function, args):
                given = ", ".join(self.argument(a, operands) for a in args)
                return f"{self.literal(function)}({given})"
            case list() | tuple():
                inside = "".join(f"{self.argument(v, operands)}, " for v in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside})"
            case _:
                return self.literal(value)

    def literal(self, value: Any) -> str:
        """A value as text, or a name that stands for it."""
        if isinstance(value, _WRITTEN):
            return repr(value)
        key = id(value)
        if key not in self._constants:
            name = f"k{len(self._constants)}"
            self._constants[key] = name
            self.space[name] = value
        return self._constants[key]
