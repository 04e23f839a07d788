"""The tutorials run, as they stand on their pages."""

import os
import sys
from pathlib import Path

import pytest

from tests.tutorials import blocks, needs, pages, run


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
    here = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "MUCUDNN_DATABASE": str(tmp_path / "cache.sqlite"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    run(path, tmp_path, env)


def test_a_page_that_fails_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```sh\nexit 3\n```\n")
    assert [block.line for block in blocks(page)] == [4, 8]
    with pytest.raises(AssertionError, match=r"page\.md"):
        run(page, tmp_path, dict(os.environ))
