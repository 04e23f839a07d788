"""The examples with PyTorch run: by themselves, and under other people's trainers."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import TORCH

pytest.importorskip("torch", reason="needs PyTorch")

pytestmark = pytest.mark.torch

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {
    "torch_accelerate": "accelerate",
    "torch_lightning": "lightning",
    "torch_transformers": "transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TORCH))
def test_example(name, tmp_path):
    package = NEEDS.get(name, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'mucudnn[trainers]'")
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "recomputed: " in done.stdout
    assert "loss " in done.stdout
    assert not list(tmp_path.iterdir())  # nothing is left behind
