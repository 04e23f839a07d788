"""cuDNN's own kernels as alternatives to ours, for operations with equal semantics.

All are of the first API and take no workspace, so the plan's workspace for our kernel
is enough for both. They are optional: if the library rejects a call with any status,
our kernel runs instead, and the library is not called for this case again.

cuDNN functions that are not here compute something else: see `batch_norm` for those
that fuse an activation with a batch normalisation.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mucudnn.backends.base import Kernel
from mucudnn.backends.cuda.conv.launch import Launch
from mucudnn.backends.cuda.cudnn_kernels import batch_norm, lrn, pooling, softmax
from mucudnn.backends.cuda.cudnn_kernels.case import Arguments, Case, LibraryOperation
from mucudnn.backends.cuda.session import Session
from mucudnn.errors import MucudnnError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import LIBRARY

__all__ = ["OPERATIONS", "CudnnKernels"]

logger = logging.getLogger(__name__)

_FILES = (batch_norm, lrn, pooling, softmax)

OPERATIONS: Mapping[str, LibraryOperation] = MappingProxyType(
    {name: made for file in _FILES for name, made in file.OPERATIONS.items()}
)
"""Operation name to its implementation by the library."""

Call = Callable[[], None]


class CudnnKernels:
    """cuDNN's kernels; see `LibraryKernels`."""

    name = "cudnn"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.times_ms: dict[str, tuple[float, float]] = {}
        self._refused: set[Case] = set()

    def offers(self, graph: Graph, node: Node) -> bool:
        """See `LibraryKernels.offers`."""
        found = OPERATIONS.get(node.op)
        if found is None:
            return False
        unwritten = {node.outputs[place] for place in found.unwritten}
        if any(graph.readers[name] or name in graph.outputs for name in unwritten):
            return False
        case = Case.of(node.op, *operands_of(graph, node))
        return case not in self._refused and found.takes(case)

    def beside(self, kernels: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
        """Return a kernel table in which nodes can ask for the library's kernels."""
        both = {op: self._either(op, kernels[op]) for op in OPERATIONS}
        return MappingProxyType({**kernels, **both})

    def _either(self, op: str, own: Kernel) -> Kernel:
        def ready(*arguments: Any) -> Call:
            attrs = arguments[2]
            if attrs.get(LIBRARY) != self.name:
                return own.call(*arguments)
            return self._guarded(op, own, arguments)

        def run(*arguments: Any) -> None:
            if arguments[2].get(LIBRARY) != self.name:
                own.run(*arguments)
            else:
                self._guarded(op, own, arguments)()

        return Kernel(run, own.workspace, ready, own.together, own.flags)

    def _guarded(self, op: str, own: Kernel, arguments: tuple[Any, ...]) -> Call:
        """Return a call of the library that falls back to our kernel on rejection."""
        inputs, outputs, attrs, workspace = arguments
        case = Case.of(op, inputs, outputs, attrs)
        launch = self._launch(case, inputs, outputs)
        if launch is None:
            return own.call(*arguments)
        kept: list[Call] = []
        left, rest = OPERATIONS[op].left, None
        if left is not None:
            rest = own.call(inputs, outputs, {**attrs, **left}, workspace)

        def call() -> None:
            if not kept:
                handle = self._session.handle()
                status = launch.function(handle, *launch.arguments)
                if not status:
                    if rest is not None:
                        rest()
                    return
                self._refuse(case, launch.name, status)
                kept.append(own.call(*arguments))
            kept[0]()

        return call

    def _launch(
        self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Launch | None:
        """Return the library's call; None if it does not take the case."""
        found = OPERATIONS[case.op]
        reads, writes = ([a.data.ptr for a in each] for each in (inputs, outputs))
        in_place = set(reads) & set(writes)
        if in_place or case in self._refused or not found.takes(case):
            return None
        calls = self._session.calls
        try:
            made = Arguments(calls, case.inputs[0].dtype)
            arguments = found.arguments(case, made, reads, writes)
        except MucudnnError as e:
            self._remember(case, e)
            return None
        return Launch(
            calls.function(found.function), arguments, found.function, (made,)
        )

    def _refuse(self, case: Case, name: str, status: int) -> None:
        try:
            self._session.calls.raise_for(name, status)
        except MucudnnError as e:
            self._remember(case, e)

    def _remember(self, case: Case, error: MucudnnError) -> None:
        if case not in self._refused:
            logger.warning("our kernel computes %s: %s", case, error)
        self._refused.add(case)
