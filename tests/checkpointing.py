"""Checkpoints without end, for a test that kills this at any moment.

`python checkpointing.py FOLDER [BYTES]`: goes on from the last checkpoint. With BYTES,
no file may become larger.
"""

import resource
import signal
import sys

import numpy as np

from mucudnn.runtime.checkpoint import Checkpoint, Checkpoints

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


def main(folder, most=None):
    if most is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    checkpoints = Checkpoints(folder)
    last = checkpoints.load(WORDS)
    step = 0 if last is None else last.step
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        step += 1
        checkpoints.save(at(step))


if __name__ == "__main__":
    main(*sys.argv[1:])
