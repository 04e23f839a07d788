"""`mucudnn` as one of several processes, of which one may end by a signal or an error.

`python mpi_rank.py RANK:STEP:HOW …` has that rank end before that step, or be slow from
it on. Where one is to be slow, all begin with equal tables, whatever the clocks say.
"""

import importlib
import os
import signal
import sys
import time

from mucudnn.__main__ import main
from mucudnn.ir.fleet import StepPoint
from mucudnn.ir.graph import IMAGE
from mucudnn.runtime.training.stepping import Stepper

SLOW_S = 0.5
SAMPLE_MS = 20.0


def equal_point(graph, tuner, settings):
    """What every rank is said to take."""
    samples = graph.tensors[IMAGE].shape[0]
    return StepPoint(samples, SAMPLE_MS * samples)


def failing(rank, step, how):
    whole = Stepper.step

    def stepped(self, images, labels, rate, number):
        if how == "slow":
            if int(os.environ["PMI_RANK"]) == rank and number >= step:
                time.sleep(SLOW_S)
            return whole(self, images, labels, rate, number)
        if int(os.environ["PMI_RANK"]) == rank and number == step:
            if how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                return whole(self, images, labels, rate, number)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("something of this rank's own")
        return whole(self, images, labels, rate, number)

    return stepped


if __name__ == "__main__":
    rank, step, how = sys.argv.pop(1).split(":")
    Stepper.step = failing(int(rank), int(step), how)
    if how == "slow":
        # The package's `train` is the command.
        importlib.import_module("mucudnn.cli.train").step_point = equal_point
    main()
