"""The examples run, are short, and end well."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
EXPECTED = {
    "plan_a_layer": "bytes",
    "replace_a_convolution": "<w, dw>",
    "share_measurements": "replayed",
    "your_own_planner": "SLOW",
}


def test_there_is_one_for_every_expectation():
    assert {example.stem for example in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[example.stem] in done.stdout
