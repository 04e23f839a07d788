"""`mucudnn` as one of several processes, of which one may end by a signal or an error.

`python mpi_rank.py RANK:STEP:HOW …` has that rank end before that step, or be slow from
it on.
"""

import os
import signal
import sys
import time

from mucudnn.__main__ import main
from mucudnn.runtime.training.stepping import Stepper

SLOW_S = 0.5


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
    main()
