"""Commands and code, run in this process or in one of their own."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from mucudnn.cli import main

ROOT = Path(__file__).parents[1]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self):
        return True


def run(*arguments: Any) -> Result:
    """Invoke `mucudnn` in this process; an error that it does not handle is raised."""
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def done(*arguments: Any) -> str:
    """Return the standard output of a command that succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*arguments: Any) -> Any:
    """Return what a command writes with `--json -`."""
    return json.loads(done(*arguments, "--json", "-"))


def refused(*arguments: Any) -> str:
    """Return the one line that a command fails with."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [s for s in result.stderr.splitlines() if "mucudnn: warning" not in s]
    assert line.startswith("mucudnn: error: ")
    return line


def start_python(*arguments: Any, environment=(), **options) -> subprocess.Popen:
    """Start Python with text pipes; it imports this copy of the library and tests."""
    variables = {**os.environ, "PYTHONPATH": path_of_modules(), **dict(environment)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=variables, text=True, **{**PIPES, **options})


def path_of_modules() -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([before] if before else [])])


def finish(process: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    """Return output and errors of a process that must end with this status."""
    with process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == status, err
    return out, err


def python(*arguments: Any, status: int = 0, **options) -> tuple[str, str]:
    """Return output and errors of Python with these arguments."""
    return finish(start_python(*arguments, **options), status)


def run_code(code: str, *arguments: Any, **options) -> str:
    """Return the output of code in another process, where a warning is an error."""
    return python("-W", "error", "-c", code, *arguments, **options)[0]
