"""Checkpoints without end, for tests that end this in the midst of them.

`python checkpointing.py FOLDER [BYTES]`: goes on from the last checkpoint. With BYTES,
no file may become larger.

`python checkpointing.py FOLDER --dying`: for each line of standard input one process
that does so and is killed, and how it ended on standard output. `touch K`: as it is
about to touch the folder for the K-th time, counted from 1; `write BYTES`: as a file
becomes larger than that.
"""

import json
import os
import resource
import signal
import sys
from functools import partial

import numpy as np
from safetensors.numpy import save

from mucudnn.runtime.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    read_arrays,
    read_header,
    seal,
    write_arrays,
)

SHAPE = (64, 257)
WORDS = {"model": "tiny", "seed": 0}


def arrays_at(step):
    """What the arrays are after so many steps."""
    rng = np.random.default_rng(step)
    return {
        "file": rng.standard_normal(SHAPE).astype(np.float32),
        "conv/weight": rng.standard_normal(SHAPE),
        "count:d": np.array(step),
    }


def at(step):
    return Checkpoint(step, arrays_at(step), WORDS, {"epoch": step // 5, "loss": 0.1})


def forge(path, change=lambda body: None, arrays=None, *, sealed=True):
    """Rewrite a checkpoint with another header or other arrays, checksums right."""
    if arrays is not None:
        write_arrays(path, arrays, read_header(path))
    body = read_header(path)
    crc = body.pop("crc32")
    change(body)
    text = json.dumps({"crc32": seal(body) if sealed else crc, **body})
    path.write_bytes(save(read_arrays(path, None), metadata={"mucudnn": text}))


def saving(folder, begun=lambda: None):
    """Go on from the last checkpoint for ever."""
    checkpoints = Checkpoints(folder)
    last = checkpoints.load(WORDS)
    step = 0 if last is None else last.step
    begun()
    while True:
        step += 1
        checkpoints.save(at(step))


def limited(nbytes, when_larger):
    signal.signal(signal.SIGXFSZ, when_larger)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def killed_at(folder, moment):
    """Arrange to be killed at the so-manieth thing that is done to a folder."""
    left = moment

    def about_to(event, args):
        nonlocal left
        touched = event.startswith(("open", "os.")) and folder in str(args[:2])
        left -= touched
        if touched and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(about_to)


def dying(folder):
    at(0)  # whatever that imports
    for line in sys.stdin:
        how, number = line.split()
        child = os.fork()
        if child == 0:
            if how == "touch":
                saving(folder, partial(killed_at, folder, int(number)))
            limited(int(number), signal.SIG_DFL)
            saving(folder)
        _, status = os.waitpid(child, 0)
        print(signal.Signals(os.WTERMSIG(status)).name, flush=True)  # noqa: T201


def main(folder, option=None):
    if option == "--dying":
        dying(folder)
        return
    if option is not None:
        limited(int(option), signal.SIG_IGN)
    saving(folder, begun=lambda: print("ready", flush=True))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
