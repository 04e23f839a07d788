"""`python -m bench.pages`: write the documentation's tables and pictures of results."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import front, gaps, torch_cuda, torch_sharded

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
TABLES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "front": front.page_lines,
    "gaps": gaps.page_lines,
    "torch-sharded": torch_sharded.page_lines,
    "torch-sharded-compiled": torch_sharded.page_lines,
    "torch-cuda": torch_cuda.page_lines,
}
"""File in `bench/results` -> the lines that its page shows of it."""


def page_of(name: str) -> Path:
    """Return the page that shows a file."""
    return ROOT / "docs" / ("gpu.md" if name == "torch-cuda" else "results.md")


def marks(name: str) -> tuple[str, str]:
    """Return the comments around the lines of a file."""
    return f"<!-- from bench/results/{name}.json -->", f"<!-- {name} end -->"


def split_page(text: str, name: str) -> tuple[str, str, str]:
    """Return what is before, within and behind the lines of a file.

    Raises:
        ValueError: The page has no place for them.
    """
    begin, end = marks(name)
    before, found, rest = text.partition(begin)
    within, closed, after = rest.partition(end)
    if not found or not closed:
        page = page_of(name)
        raise ValueError(f"{page} has no place for the tables: {begin} … {end}")
    return before + begin, within, end + after


def lines_of(name: str) -> str:
    """Return the lines that the page shows of a file; none before it is measured."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return ""
    return "\n".join(TABLES[name](json.loads(file.read_text("utf-8"))))


def main() -> None:
    """Write all of them."""
    for name in TABLES:
        page = page_of(name)
        before, _, after = split_page(page.read_text("utf-8"), name)
        page.write_text(f"{before}\n\n{lines_of(name)}\n\n{after}", "utf-8")
    result = json.loads((RESULTS / "front.json").read_text("utf-8"))
    (ROOT / "docs/img/front.svg").write_text(front.picture(result), "utf-8")


if __name__ == "__main__":
    main()
