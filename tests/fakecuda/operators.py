"""Operators that ask for write access to an operand, seen without computing anything.

    python -m tests.fakecuda.operators

A kernel asks PyTorch for the address of a tensor either to read it or to write it. If
the tensor is a lazy clone (`torch._lazy_clone`), asking to write it makes its copy
real. So an operator that declares no write, but leaves a clone real, may write it.

Run as a program, it calls every operation that PyTorch itself tests, forward and
backward, and prints the operators below them as JSON.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.pytorch_steps import is_traced


class WriteAccess(TorchDispatchMode):
    """Notes every operator that asks for an operand to write without declaring it.

    Attributes:
        called: Names of the operators that declare no write, and were called.
        written: Those that asked to write operands, with the operands' names.
        counted: Those of which an operand's version counter has moved.
    """

    def __init__(self):
        super().__init__()
        self.called, self.written, self.counted = set(), {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable or func.is_view or is_traced(pytree.tree_leaves(args)):
            return func(*args, **kwargs)
        clones = {}

        def cloned(value):
            if _is_plain(value):
                clones.setdefault(id(value), torch._lazy_clone(value))
            return clones.get(id(value), value)

        mine, named = pytree.tree_map(cloned, (args, kwargs))
        ours = {id(clone): clone._version for clone in clones.values()}
        found = func(*mine, **named)
        self.called.add(schema.name)
        for argument, value in zip(schema.arguments, mine, strict=False):
            leaves = [leaf for leaf in pytree.tree_leaves(value) if id(leaf) in ours]
            if not all(map(torch._C._is_cow_tensor, leaves)):
                self.written.setdefault(schema.name, set()).add(argument.name)
            if any(leaf._version != ours[id(leaf)] for leaf in leaves):
                self.counted.add(schema.name)
        return found


def _is_plain(value):
    """Return whether a tensor of the device can be cloned lazily."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.is_cuda
        and value.layout is torch.strided
        and value.numel() > 0
    )


def main():
    from torch.testing._internal.common_methods_invocations import op_db

    logging.disable()
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)
    mode, ran = WriteAccess(), 0
    for op in op_db:
        if op.supports_dtype(torch.float32, "cuda"):
            # Some need a library or values that the stand-in does not have.
            for with_cudnn in (True, False):
                with suppress(Exception), torch.backends.cudnn.flags(with_cudnn):
                    _run(op, mode)
                    ran += 1
                    break
    written = {name: sorted(operands) for name, operands in mode.written.items()}
    found = {"ran": ran, "called": sorted(mode.called), "written": written}
    print(json.dumps({**found, "counted": sorted(mode.counted)}))  # noqa: T201


def _run(op, mode):
    """Run an operation of PyTorch's tests on its first example."""
    grad = op.supports_autograd
    example = next(iter(op.sample_inputs("cuda", torch.float32, requires_grad=grad)))
    with mode:
        result = op.op(example.input, *example.args, **example.kwargs)
        torch.autograd.backward([_real(t).sum() for t in _differentiable(result)])


def _differentiable(result) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


def _real(tensor):
    return tensor.abs() if tensor.is_complex() else tensor


if __name__ == "__main__":
    main()
