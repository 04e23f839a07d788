"""Lines of the user's own code, in tracebacks and in recorded stacks."""

import re
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

import torch

__all__ = ["line_now", "line_of_stack", "line_of_traceback"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def line_of_traceback(traceback: TracebackType | None) -> str:
    """Where an error came from: " (FILE:LINE, in FUNCTION)", or nothing."""
    found = ""
    while traceback is not None:
        found = _said(traceback.tb_frame, traceback.tb_lineno) or found
        traceback = traceback.tb_next
    return found


def line_now() -> str:
    """The innermost line of the user's that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if found := _said(frame, frame.f_lineno):
            return found
        frame = frame.f_back
    return ""


def line_of_stack(stack: str | None) -> str:
    """The innermost line of the user's in a stack that PyTorch recorded as text."""
    for file, line, function in reversed(_FRAME.findall(stack or "")):
        if _theirs(file):
            return f" ({file}:{line}, in {function})"
    return ""


def _said(frame: FrameType, line: int) -> str:
    code = frame.f_code
    if not _theirs(code.co_filename):
        return ""
    return f" ({code.co_filename}:{line}, in {code.co_name})"


def _theirs(file: str) -> bool:
    if file.startswith("<"):
        return False
    if file.startswith((_PACKAGE, _TORCH)):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file
