"""Locate lines of user code in tracebacks and stacks; identify storages of tensors."""

import functools
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, TracebackType

import torch

from mucudnn.passes.liveness import rounded

_PACKAGE = str(Path(__file__).resolve().parents[1])

_TORCH = str(Path(torch.__file__).resolve().parent)

_STANDARD = sysconfig.get_paths()["stdlib"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@functools.cache
def torch_packages() -> frozenset[str]:
    """Return the packages that PyTorch requires, and NumPy."""
    required = importlib.metadata.requires("torch") or ()
    names = (re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required)
    return frozenset({*(n.replace("-", "_").lower() for n in names), "numpy"})


def is_torch_file(file: str) -> bool:
    """Return whether a file is of PyTorch or ours."""
    return file.startswith((_PACKAGE, _TORCH))


@functools.cache
def is_library_file(file: str) -> bool:
    """Return whether a file is of Python, PyTorch, a package that it needs, or ours."""
    if file.startswith("<"):
        return file.startswith(("<frozen", "<eval_with_key", "<attrs generated"))
    if is_torch_file(file):
        return True
    _, found, installed = file.rpartition("site-packages" + os.sep)
    if found:
        package = installed.partition(os.sep)[0].removesuffix(".py").lower()
        return package in torch_packages()
    return file.startswith(_STANDARD)


def line_of_function(code: CodeType) -> str:
    """Return where a function begins: " (FILE:LINE, in FUNCTION)"."""
    return f" ({code.co_filename}:{code.co_firstlineno}, in {code.co_name})"


def line_of_traceback(traceback: TracebackType | None) -> str:
    """Return the last user line of a traceback: " (FILE:LINE, in FUNCTION)".

    If there is none, return the last method of a module, " (in CLASS.METHOD)", or "".
    """
    found = within = ""
    for frame, line in walk_tb(traceback):
        found = _line_of_frame(frame, line) or found
        own = frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module):
            within = f" (in {type(own).__name__}.{frame.f_code.co_name})"
    return found or within


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether an error was raised by a line of the user's own code."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return not frames or _is_user_file(frames[-1].f_code.co_filename)


def line_now() -> str:
    """Return the innermost user line that is running, or ""."""
    lines = (_line_of_frame(*where) for where in walk_stack(sys._getframe(1)))
    return next(filter(None, lines), "")


def line_of_stack(stack: str | None) -> str:
    """Return the innermost user line of a stack in PyTorch's text form, or ""."""
    for file, line, function in reversed(_FRAME.findall(stack or "")):
        if _is_user_file(file):
            return f" ({file}:{line}, in {function})"
    return ""


def _line_of_frame(frame: FrameType, line: int) -> str:
    code = frame.f_code
    if not _is_user_file(code.co_filename):
        return ""
    return f" ({code.co_filename}:{line}, in {code.co_name})"


def _is_user_file(file: str) -> bool:
    if file.startswith("<") or is_torch_file(file):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


# Identity of a tensor's storage.
#
# PyTorch has no public identifier of a storage: `data_ptr` is zero for fake tensors,
# and `untyped_storage()` returns a new object every time.


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors, real or fake, that share a storage.

    It may be reused as soon as no tensor has the storage any more.
    """
    return int(tensor.untyped_storage()._cdata)


def bytes_in_storages(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors' storages, each once, rounded as by the allocator."""
    storages = {storage_of(t): t.untyped_storage() for t in tensors}
    return sum(rounded(int(storage.nbytes())) for storage in storages.values())
