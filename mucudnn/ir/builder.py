"""Build forward graphs layer by layer.

A layer appends nodes to the builder and returns the name of its result. Names are
derived from the operation and a counter, below the current `scope`. Layers declare
their own parameters. To branch, use a tensor's name twice: nothing is copied.
The layers are functions that take a builder (`ir/layers/`), bound here as methods.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mucudnn.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_integers,
    check_text,
    check_type,
)
from mucudnn.ir import layers
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.initializers import Initializer
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE, Role, TensorSpec
from mucudnn.ir.traits import NodeTraits

Saved = tuple[str, tuple[int, ...], str]
"""Label, shape and data type of a tensor that a node saves for its gradient."""


class GraphBuilder:
    """A forward graph under construction.

    >>> g = GraphBuilder()
    >>> x, labels = g.input("image", (8, 3, 32, 32)), g.input("label", (8,), "int64")
    >>> x = g.max_pool(g.relu(g.conv(x, 16, 3, padding=1)), 2)
    >>> logits = g.linear(g.flatten(x), 10)
    >>> graph = g.build(g.softmax_cross_entropy(logits, labels))
    >>> g.shape(logits), graph.parameter_count
    ((8, 10), 41418)

    A custom layer is a function of the builder and of tensor names:

    >>> def residual(g, x, name="residual"):
    ...     with g.scope(name):
    ...         y = g.relu(g.conv(x, g.shape(x)[1], 3, padding=1))
    ...         return g.add(x, y)
    >>> g = GraphBuilder()
    >>> residual(g, g.input("image", (8, 16, 32, 32)))
    'residual/add'

    Args:
        dtype: Data type of activations and parameters.
        training: Whether batch norm uses the batch's statistics and dropout drops.
        seed: Seed from which every dropout layer derives its own.

    Attributes:
        tensors: Declared tensors by name.
        nodes: Appended nodes in order.
        initializers: Initializer of each parameter and state tensor.
    """

    conv = layers.conv
    conv_transpose = layers.conv_transpose
    bias = layers.bias
    linear = layers.linear

    max_pool = layers.max_pool
    avg_pool = layers.avg_pool
    global_max_pool = layers.global_max_pool
    global_avg_pool = layers.global_avg_pool

    batch_norm = layers.batch_norm
    group_norm = layers.group_norm
    layer_norm = layers.layer_norm
    lrn = layers.lrn

    relu = layers.relu
    leaky_relu = layers.leaky_relu
    gelu = layers.gelu
    sigmoid = layers.sigmoid
    tanh = layers.tanh
    dropout = layers.dropout
    add = layers.add
    multiply = layers.multiply
    scale = layers.scale
    cast = layers.cast

    concat = layers.concat
    slice = layers.slice
    pad = layers.pad
    reshape = layers.reshape
    flatten = layers.flatten
    upsample_nearest = layers.upsample_nearest
    upsample_bilinear = layers.upsample_bilinear

    softmax_cross_entropy = layers.softmax_cross_entropy
    mean_squared_error = layers.mean_squared_error
    accuracy = layers.accuracy

    def __init__(
        self, *, dtype: str = "float32", training: bool = True, seed: int = 0
    ) -> None:
        self.dtype = check_choice("dtype", dtype, ITEMSIZE)
        self.training = check_bool("training", training)
        self.seed = check_integer("seed", seed, least=0)
        self.tensors: dict[str, TensorSpec] = {}
        self.nodes: list[Node] = []
        self.initializers: dict[str, Initializer] = {}
        self._scopes: list[str] = []
        self._counts: dict[str, int] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix all names declared inside the context with `name/`."""
        self._scopes.append(self._unique(name))
        try:
            yield
        finally:
            self._scopes.pop()

    def spec(self, tensor: str) -> TensorSpec:
        """Return shape, data type and role of a tensor.

        Raises:
            ValueError: No tensor has that name.
            TypeError: The name is not a string.
        """
        if not isinstance(tensor, str):
            raise TypeError(
                f"expected the name of a tensor, as layers return it; got {tensor!r}"
            )
        try:
            return self.tensors[tensor]
        except KeyError:
            raise ValueError(f"there is no tensor {tensor!r}") from None

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor; unknown names raise a `ValueError`."""
        return self.spec(tensor).shape

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> str:
        """Declare a tensor that the caller supplies at every step."""
        sizes = check_integers(f"shape of {name!r}", shape, least=1)
        kind = self.dtype if dtype is None else dtype
        check_choice("dtype", kind, (*ITEMSIZE, *INTEGERS))
        spec = TensorSpec(check_text("name", name), sizes, kind, Role.INPUT)
        return self._declare(spec)

    def parameter(
        self, name: str, shape: Sequence[int], initializer: Initializer
    ) -> str:
        """Declare a trainable tensor."""
        return self._persistent(name, shape, initializer, Role.PARAMETER)

    def state(self, name: str, shape: Sequence[int], initializer: Initializer) -> str:
        """Declare a tensor that persists across steps and has no gradient."""
        return self._persistent(name, shape, initializer, Role.STATE)

    def append(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        saved: Sequence[Saved] = (),
        *,
        dtype: str | None = None,
        alias: str | None = None,
        mutates: tuple[str, ...] = (),
        traits: NodeTraits | None = None,
        **attrs: Any,
    ) -> str:
        """Append a node and declare its outputs.

        Args:
            op: Name of the operation in the backends' kernel tables.
            inputs: Names of the input tensors.
            shape: Shape of the result.
            saved: Further outputs, saved for the gradient.
            dtype: Data type of the result; by default that of the first input, or the
                builder's.
            alias: Tensor whose storage the result shares.
            mutates: Inputs that the node overwrites.
            traits: Traits of a custom operation; those of built-in ones are known.
            attrs: Attributes passed to the kernel.

        Returns:
            The name of the result, which is also the node's name.
        """
        name = self._unique(op)
        kind = dtype or (self.spec(inputs[0]).dtype if inputs else self.dtype)
        specs = [TensorSpec(name, shape, kind, alias=alias)]
        for label, sizes, of in saved:
            specs.append(TensorSpec(f"{name}:{label}", sizes, of))
        written = tuple(self._declare(spec) for spec in specs)
        node = make_node(
            self.tensors, name, op, inputs, written, attrs, mutates=mutates
        )
        self.nodes.append(node if traits is None else replace(node, traits=traits))
        return name

    def build(self, *outputs: str) -> Graph:
        """Freeze the graph; a training network's first output is its loss."""
        for name in outputs:
            self.spec(name)
        return Graph(
            self.tensors,
            tuple(self.nodes),
            outputs,
            initializers=self.initializers,
        )

    def _persistent(
        self, name: str, shape: Sequence[int], initializer: Initializer, role: Role
    ) -> str:
        sizes = check_integers(f"shape of {name!r}", shape, least=1)
        check_type(
            f"initializer of {name!r}",
            initializer,
            Initializer.__args__,
            "one of mucudnn.ir.initializers, such as HeNormal() or Constant(0.0)",
        )
        full = self._unique(name)
        self.initializers[full] = initializer
        return self._declare(TensorSpec(full, sizes, self.dtype, role))

    def _declare(self, spec: TensorSpec) -> str:
        if spec.name in self.tensors:
            raise ValueError(f"tensor {spec.name!r} is already declared")
        self.tensors[spec.name] = spec
        return spec.name

    def _unique(self, name: str) -> str:
        # Scopes are full names already; counters are per name in its scope.
        full = "/".join([*self._scopes[-1:], check_text("name", name)])
        count = self._counts.get(full, 0)
        self._counts[full] = count + 1
        return full if count == 0 else f"{full}.{count}"
