"""A plug-in whose algorithms do what their names say; copied out to be installed.

Rows carry the process that measured them as a note. Every process that loads the
plug-in is listed in `pids` next to the copy.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from mucudnn.backends import Backend
from mucudnn.backends.null import NullConv
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import BackendError, BackendUnavailableError, UnsupportedError
from mucudnn.ir.numerics import Traits

ALGORITHMS = [
    "ABORT",
    "EXIT",
    "GOOD",
    "HANG",
    "KILL",
    "LIBRARY",
    "MEMORY",
    "PRINT",
    "READ",
    "STATUS",
    "UNSUPPORTED",
]


class Context(VirtualDevice):
    """A device that is lost for good once a kernel has spoilt it, as CUDA's are."""

    spoilt = False

    def elapsed_ms(self, start, stop):
        if self.spoilt:
            raise BackendError("the context is unusable")
        return super().elapsed_ms(start, stop)


class Misbehaving(NullConv):
    def __init__(self, device, offered):
        super().__init__(device)
        self._offered = offered
        self._context = device

    def algorithms(self, problem):
        return [(algo, 0) for algo in self._offered]

    def traits(self, problem, algo):
        return Traits(notes=(str(os.getpid()),))

    def run(self, problem, algo, *operands, accumulate=False):
        match algo:
            case "ABORT":
                sys.stderr.write("assertion failed in libabort.so\n")
                os.abort()
            case "EXIT":
                os._exit(3)
            case "HANG":
                (Path(__file__).parent / "hanging").touch()
                ctypes.PyDLL(None).sleep(1000)  # and no other Python thread runs
            case "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "LIBRARY":
                raise ZeroDivisionError("in somebody's library")
            case "MEMORY":
                raise MemoryError("no host memory")
            case "PRINT":
                sys.stdout.write('{"row": "forged"}\n')
                sys.stdout.flush()
                os.write(1, b"noise\n")
                os.system("echo more noise")
            case "READ":
                if sys.stdin.read() != "" or os.read(0, 1) != b"":
                    raise UnsupportedError("stdin is not empty")
            case "STATUS":
                self._context.spoilt = True
                raise BackendError("status 700: illegal address")
            case "UNSUPPORTED":
                raise UnsupportedError("not this shape")
        super().run(problem, "SLOW", *operands, accumulate=accumulate)


def device_count(argument):
    return 2


def load(argument, device):
    """`misbehaving:A+B` offers two algorithms; some words stand for a bad start."""
    here = Path(__file__).parent
    with (here / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    in_child = (here / "parent").read_text() != str(os.getpid())
    loads = len((here / "pids").read_text().split())
    if in_child and (argument == "never" or (argument == "late" and loads <= 3)):
        sys.stderr.write("libstart.so: no such file\n")
        os.abort()
    if in_child and argument == "absent":
        raise BackendUnavailableError("the driver is too old")
    null = Context("misbehaving")
    named = argument.split("+") if argument else ALGORITHMS
    offered = [algo for algo in named if algo in ALGORITHMS] or ["GOOD"]
    return Backend(
        f"misbehaving:{argument}",
        null,
        Misbehaving(null, offered),
        index=device,
        may_crash=True,
    )
