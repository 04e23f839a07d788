"""Describe a network, or a whole training step, as tensors and nodes.

Nodes are in execution order and every name is written once. A view, or a result that
overwrites its input, is a separate tensor with an `alias`: it shares the storage of
another tensor. State that outlives a step (weights, running statistics) is changed by
nodes that list it in `mutates`.
"""

import enum
import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mucudnn.ir.initializers import CopyOf, Initializer
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import PLAIN, NodeTraits

PERSISTENT = (Role.PARAMETER, Role.STATE, Role.BORROWED)
"""Roles of tensors that outlive a step."""


class Phase(enum.Enum):
    """Part of a training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel launch. Its position in `Graph.nodes` is its time.

    Attributes:
        name: Unique name in the graph.
        op: Name of the operation in the backends' kernel tables.
        inputs: Tensors it reads.
        outputs: Tensors it writes, for the first and only time.
        attrs: Attributes passed to the kernel.
        phase: Part of the step.
        mutates: Inputs that it overwrites.
        traits: Properties that graph passes rely on.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    phase: Phase = Phase.FORWARD
    mutates: tuple[str, ...] = ()
    traits: NodeTraits = PLAIN

    @property
    def recomputable(self) -> bool:
        """True if the node can run again without changing any state."""
        traits = self.traits
        pure = (
            not self.mutates or bool(traits.replay) or traits.recompute_as is not None
        )
        return traits.recomputable and pure

    @property
    def recompute_node(self) -> "Node | None":
        """Node that recomputes the first result; None if a plain copy does."""
        again = self.traits.recompute_as
        if again is None:
            return None
        inputs = tuple(self.tensors[index] for index in again.inputs)
        return replace(
            self,
            op=again.op,
            inputs=inputs,
            outputs=self.outputs[:1],
            attrs=MappingProxyType({}),
            mutates=(),
            traits=again.traits,
        )

    def remakes(self, tensor: str) -> bool:
        """Return whether a result of the node can be recomputed."""
        return self.recomputable and (
            self.traits.recompute_as is None or tensor == self.outputs[0]
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """Inputs and outputs."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True, slots=True)
class Saved:
    """A forward result that the backward pass reads.

    Attributes:
        name: Name of the tensor.
        nbytes: Size of the tensor.
        producer: Node that computes the tensor.
        first: Position of the producer among the graph's nodes.
        last: Position of the last forward use.
        again: Position of the first backward use.
    """

    name: str
    nbytes: int
    producer: Node
    first: int
    last: int
    again: int


@dataclass(frozen=True)
class Graph:
    """A sequence of nodes, in execution order, over named tensors.

    Attributes:
        tensors: Every tensor by name.
        nodes: In execution order.
        outputs: Tensors that a run returns: losses, metrics, or gradients.
        gradients: Parameter -> its gradient, in a training graph.
        initializers: Initializer of each parameter and state tensor.

    Raises:
        ValueError: A node reads a tensor before it is written, writes an undeclared
            one or writes one twice, or is a view of none of its inputs.
    """

    tensors: Mapping[str, TensorSpec]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    gradients: Mapping[str, str] = field(default_factory=dict)
    initializers: Mapping[str, Initializer | CopyOf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Mappings are copied: nobody else can change them.
        for name in ("tensors", "gradients", "initializers"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        known = set(self.inputs)
        names = set()
        for node in self.nodes:
            if node.name in names:
                raise ValueError(f"two nodes are called {node.name!r}")
            names.add(node.name)
            for name in node.inputs:
                if name not in known:
                    raise ValueError(
                        f"node {node.name!r} reads {name!r} before it is written"
                    )
            known.update(node.outputs)
            if not node.traits.view:
                continue
            # A view without the bytes of an input would read memory that nobody wrote.
            read = {self.storages[name] for name in node.inputs}
            for name in node.outputs:
                if self.storages[name] not in read:
                    raise ValueError(
                        f"node {node.name!r} is a view, but {name!r} does not alias "
                        "any of its inputs; set its alias to one of "
                        f"{', '.join(node.inputs)}"
                    )
        for name in (*self.outputs, *self.gradients.values()):
            if name not in known:
                raise ValueError(f"output {name!r} is never written")

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that no node writes: data, parameters and state."""
        # Writers are validated here, as every graph asks for its inputs when it is
        # made.
        written: dict[str, str] = {}
        for node in self.nodes:
            for name in node.outputs:
                if name not in self.tensors:
                    raise ValueError(
                        f"node {node.name!r} writes {name!r}, which is not declared"
                    )
                if name in written:
                    raise ValueError(
                        f"{name!r} is written by {written[name]!r} and {node.name!r}"
                    )
                written[name] = node.name
        return tuple(name for name in self.tensors if name not in written)

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Tensor -> the node that writes it."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Node -> its position."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """Tensor -> the nodes that read it under this name, in order."""
        found: dict[str, list[Node]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def reads(self) -> Mapping[str, tuple[int, ...]]:
        """Storage -> positions of the nodes that read it, ascending."""
        found: dict[str, dict[int, None]] = {}
        for position, node in enumerate(self.nodes):
            for name in node.inputs:
                found.setdefault(self.storages[name], {})[position] = None
        return {storage: tuple(positions) for storage, positions in found.items()}

    @cached_property
    def storages(self) -> Mapping[str, str]:
        """Tensor -> its storage: the root of its chain of aliases."""
        found: dict[str, str] = {}
        for name, spec in self.tensors.items():
            if spec.alias is None:
                found[name] = name
                continue
            chain = [name]
            # Follow the aliases to a storage that is known, and note it for the whole
            # chain.
            while chain[-1] not in found:
                alias = self.tensors[chain[-1]].alias
                if alias is None:
                    break
                chain.append(alias)
            root = found.get(chain[-1], chain[-1])
            found.update(dict.fromkeys(chain, root))
        return found

    def offset(self, name: str) -> int:
        """Return the byte offset of a tensor in its storage."""
        spec = self.tensors[name]
        total = spec.offset
        while spec.alias is not None:
            spec = self.tensors[spec.alias]
            total += spec.offset
        return total

    @cached_property
    def overwritten(self) -> Mapping[int, tuple[str, ...]]:
        """Position of a node -> storages whose contents it replaces."""
        found: dict[int, tuple[str, ...]] = {}
        for position, node in enumerate(self.nodes):
            own = () if node.traits.view else node.outputs
            replaced = (name for name in own if self.tensors[name].alias is not None)
            if names := (*node.mutates, *replaced):
                found[position] = tuple(self.storages[name] for name in names)
        return found

    @cached_property
    def overwriting(self) -> Mapping[str, tuple[int, ...]]:
        """Storage -> positions of the nodes that replace its contents, ascending."""
        found: dict[str, tuple[int, ...]] = {}
        for position, storages in self.overwritten.items():
            for storage in storages:
                found[storage] = (*found.get(storage, ()), position)
        return found

    @cached_property
    def immovable(self) -> frozenset[str]:
        """Storages that are never offloaded: borrowed ones, immovable results."""
        fixed = (node for node in self.nodes if not node.traits.movable)
        results = (name for node in fixed for name in node.outputs)
        borrowed = (spec.name for spec in self.with_role(Role.BORROWED))
        return frozenset(self.storages[name] for name in (*results, *borrowed))

    def activations(self) -> Iterator[tuple[int, TensorSpec, list[int], list[int]]]:
        """Yield results of forward nodes, in order of production.

        Views and state are left out. Each comes with the position of its producer, and
        the positions of forward and of backward nodes that read it or a view of it.
        """
        is_forward = [node.phase is Phase.FORWARD for node in self.nodes]
        for i, node in enumerate(self.nodes):
            for name in node.outputs if is_forward[i] else ():
                spec = self.tensors[name]
                if spec.alias is None and spec.role is Role.ACTIVATION:
                    uses = self.reads.get(name, ())
                    forward = [p for p in uses if is_forward[p]]
                    yield i, spec, forward, [p for p in uses if not is_forward[p]]

    @cached_property
    def saved(self) -> tuple[Saved, ...]:
        """Forward results that backward nodes read, in order of production."""
        found = []
        for i, spec, forward, backward in self.activations():
            if backward:
                last, node = max([i, *forward]), self.nodes[i]
                found.append(Saved(spec.name, spec.nbytes, node, i, last, backward[0]))
        return tuple(found)

    def with_aliases(
        self,
        tensors: Mapping[str, TensorSpec],
        storages: Mapping[str, str] | None = None,
    ) -> "Graph":
        """Return a graph with other storage sharing, without validating it again.

        Args:
            tensors: All tensors; they differ from the current ones in `alias` only, and
                no view is among those that differ.
            storages: Storages of these tensors, if known.
        """
        found = copy(self)
        # These follow from aliases; all other cached properties stay valid.
        for name in ("storages", "reads", "overwritten", "immovable", "saved"):
            found.__dict__.pop(name, None)
        object.__setattr__(found, "tensors", tensors)
        if storages is not None:
            found.__dict__["storages"] = storages
        return found

    def with_more_nodes(
        self,
        tensors: Mapping[str, TensorSpec],
        nodes: tuple[Node, ...],
        storages: Mapping[str, str] | None = None,
    ) -> "Graph":
        """Return the same step with inserted nodes, without validating it again.

        Args:
            tensors: All tensors; the additional ones are results of inserted nodes.
            nodes: All nodes in execution order.
            storages: Storages of these tensors, if known.
        """
        found = copy(self)
        fields = ("tensors", "nodes", "outputs", "gradients", "initializers", "inputs")
        # Every cached property depends on the nodes, except the inputs.
        for name in found.__dict__.keys() - set(fields):
            del found.__dict__[name]
        found.__dict__.update(tensors=tensors, nodes=nodes)
        if storages is not None:
            found.__dict__["storages"] = storages
        return found

    def with_role(self, *roles: Role) -> Iterator[TensorSpec]:
        """Yield tensors of some roles with their own storage, as declared."""
        return (
            spec
            for spec in self.tensors.values()
            if spec.role in roles and spec.alias is None
        )

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(spec.shape) for spec in self.with_role(Role.PARAMETER))


IMAGE = "image"
"""Name of the input of images, (N, C, *spatial)."""

LABEL = "label"
"""Name of the input of labels: int64 (N,), or (N, *spatial) per pixel."""
