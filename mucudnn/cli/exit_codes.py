"""How a command ends, as a number; every one that there is."""

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """What a shell sees in `$?`. A signal's are 128 and its number, as in shells."""

    DONE = 0
    """What was asked for is done."""
    CLOSED_PIPE = 1
    """Whoever read the output stopped reading."""
    BAD_INPUT = 2
    """What was asked for cannot be had; one line on the error stream says why."""
    NOTHING_FITS = 4
    """The question is answered, and the answer is that nothing fits."""
    HUNG_UP = 129
    """The terminal is gone (SIGHUP); what was done by then is written."""
    INTERRUPTED = 130
    """Ctrl-C (SIGINT); what was done by then is written."""
    TERMINATED = 143
    """Ended from outside (SIGTERM); what was done by then is written."""
