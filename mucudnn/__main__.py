"""Run the command `mucudnn`, also as `python -m mucudnn`.

The import of the command line takes a noticeable time during which users may press
Ctrl-C, so everything is imported inside the guard.
"""

import os
import sys


def main() -> None:
    """Run the command and end the process; see `mucudnn.cli.app.ExitCode`."""
    interrupts = None
    try:
        _open_standard_streams()
        import signal

        from mucudnn.processes import Interrupts, end_children

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Outside the guard, Ctrl-C ends the interpreter without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with Interrupts(_exit_at_once) as interrupts:
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
        # The interpreter remembers if `KeyboardInterrupt` ended the last `exec` or
        # `eval` of a string, and then kills itself by SIGINT at exit, even if the
        # exception was caught. Dataclasses and named tuples are built by `exec`, so any
        # import may leave this mark: clear it.
        exec("")


def _open_standard_streams() -> None:
    """Fill closed descriptors 0 to 2, or the next opened file would get one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _exit_at_once(number: int) -> None:
    """Exit without cleanup, but make the terminal's cursor visible again."""
    from mucudnn.processes import end_children

    end_children()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
