"""Runs a page of the documentation as its reader would, block by block.

Blocks of Python and of shell commands run, in one folder, in order; a block with a
title is a file that is written. Other blocks are only shown.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A block of code, and the line of the page on which it starts."""

    language: str
    title: str | None
    text: str
    line: int


def pages() -> list[Path]:
    """Pages that hold something to run."""
    return [path for path in sorted(DOCS.rglob("*.md")) if any(blocks(path))]


def needs(path: Path) -> str | None:
    """What a page's front matter says that it needs, such as "torch"."""
    found = re.match(r"---\nneeds: (\w+)\n---\n", path.read_text(encoding="utf-8"))
    return found and found[1]


def blocks(path: Path) -> Iterator[Block]:
    """What is to be run or written, in order."""
    page = path.read_text(encoding="utf-8")
    for found in BLOCK.finditer(page):
        if found["title"] or found["language"] in ("python", "sh"):
            line = page.count("\n", 0, found.start()) + 2
            yield Block(found["language"], found["title"], found["text"], line)


def run(path: Path, folder: Path, env: dict[str, str]) -> None:
    """Run a page in an empty folder, as one script: a shell command is a line of it.

    Raises:
        AssertionError: A block fails; it says where and what was printed.
    """
    script = ["import subprocess"]
    for block in blocks(path):
        text = block.text
        if block.title:
            (folder / block.title).write_text(text, encoding="utf-8")
            continue
        if block.language == "sh":
            text = f"subprocess.run(['bash', '-euc', {text!r}], check=True)\n"
        script += [f"# {path.name}, line {block.line}", text]
    (folder / "the_page.py").write_text("\n".join(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "the_page.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{path.name}: {done.stdout}\n{done.stderr}"
