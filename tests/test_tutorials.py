"""The tutorials run, as they stand on their pages."""

import os
import sys
from pathlib import Path

import pytest

from tests.tutorials import BLOCK, DOCS, blocks, needs, pages, run


def _marked(path: Path) -> object:
    extra = needs(path)
    marks = [pytest.mark.slow]
    if extra:
        marks = [getattr(pytest.mark, extra)]
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", [_marked(path) for path in pages()])
def test_a_page_runs(path, tmp_path):
    if extra := needs(path):
        pytest.importorskip(extra)
    run(path, tmp_path, _environment(tmp_path))


def _environment(folder: Path) -> dict[str, str]:
    """Caches in a folder, and this project's commands."""
    here = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "MUCUDNN_DATABASE": str(folder / "cache.sqlite"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


@pytest.mark.torch
def test_the_code_of_the_readme_runs(tmp_path):
    pytest.importorskip("torch")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    python = [found[0] for found in BLOCK.finditer(readme) if found[1] == "python"]
    assert len(python) >= 3
    page = tmp_path / "README.md"
    page.write_text("\n".join(python), encoding="utf-8")
    run(page, tmp_path, _environment(tmp_path))


def test_a_page_that_fails_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```sh\nexit 3\n```\n")
    assert [block.line for block in blocks(page)] == [4, 8]
    with pytest.raises(AssertionError, match=r"page\.md"):
        run(page, tmp_path, dict(os.environ))
