"""The command `mucudnn`, also as `python -m mucudnn`, from its first moment on.

Importing it takes a part of a second, in which people press Ctrl-C, too: so everything
is imported inside the guard.
"""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command and end the process; see `mucudnn.cli.app.ExitCode`."""
    interrupts = None
    try:
        _open_standard_streams()
        import signal

        from mucudnn.runtime.interrupts import Interrupts, end_children

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # What the guard leaves behind: the interpreter's own end is no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with Interrupts(_end) as interrupts:
            from mucudnn.cli import main as command

            try:
                command(prog_name="mucudnn", obj=interrupts)
            finally:
                if interrupts.number is not None:
                    end_children()
    except KeyboardInterrupt:
        number = None if interrupts is None else interrupts.number
        sys.exit(128 + (number or 2))
    finally:
        _end_by_the_exit_code()


def _end_by_the_exit_code() -> None:
    """Let `python -m` end so even where Ctrl-C came while code in a text ran.

    It notes whether `KeyboardInterrupt` left the last `exec` or `eval` of a text, and
    if so kills itself by SIGINT in the end, whoever caught that. Dataclasses and named
    tuples are made from texts: any import may be the place.
    """
    exec("")


def _open_standard_streams() -> None:
    """Where one was closed, a file of the command would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _end(number: int) -> None:
    """At once: nothing more is written, but the terminal gets its cursor back."""
    from mucudnn.runtime.interrupts import end_children

    end_children()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
