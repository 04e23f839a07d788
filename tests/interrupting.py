"""Commands that are sent signals at moments that their own imports choose.

A folder on the child's path has a `sitecustomize` that acts when the child imports a
module, so that no test waits for a moment.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

from tests.commands import start_python

SITE = """
import os, sys

class Trigger:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not self.__dict__.setdefault("done", False):
            self.done = True
            for number in {numbers!r}:
                {action}

sys.meta_path.insert(0, Trigger())
"""


def usual_signals() -> None:
    """In a child, before it starts: what a shell's background may have ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def site(folder: Path, code: str) -> dict[str, str]:
    """An environment in which every Python runs `code` first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def at_import(
    folder: Path, module: str, *numbers: int, within: str = "{}"
) -> dict[str, str]:
    """An environment in which importing `module` sends signals, `within` other code."""
    action = within.format("os.kill(os.getpid(), number)")
    numbers = [*map(int, numbers)]
    return site(folder, SITE.format(module=module, numbers=numbers, action=action))


@contextmanager
def start(*arguments: str, env=None, before=usual_signals, **options):
    """`python -m mucudnn` with its streams as text pipes; killed if it still runs."""
    child = start_python(
        "-m", "mucudnn", *arguments, environment=env or {}, preexec_fn=before, **options
    )
    with child:
        try:
            yield child
        finally:
            child.kill()
