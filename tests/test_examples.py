"""The examples run, are short, and end well."""

from pathlib import Path

import pytest

from tests.commands import python
from tests.data_files import write_cifar10_binary

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
EXPECTED = {
    "plan_a_layer": "bytes",
    "less_than_its_weights": "are stored on the host",
    "replace_a_convolution": "<w, dw>",
    "share_measurements": "replayed",
    "train_digits": "epoch 5: ",
    "train_resnet20": "after 3 steps: test accuracy",
    "your_own_block": "test accuracy",
    "your_own_planner": "SLOW",
}

TORCH = {
    "torch_accelerate",
    "torch_compile_backend",
    "torch_lightning",
    "torch_train_step",
    "torch_transformers",
}
"""Run by tests of their own, where there is PyTorch."""

RANKS = {"torch_distribute", "torch_sharded"}
"""Several processes each: run where ranks are tested."""

SLOW = ("replace_a_convolution", "train_resnet20", "train_digits")


def test_there_is_one_for_every_expectation():
    assert {example.stem for example in EXAMPLES} == {*EXPECTED, *TORCH, *RANKS}
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem
        )
        for path in EXAMPLES
        if path.stem not in TORCH | RANKS
    ],
)
def test_example(example, tmp_path):
    arguments = []
    if example.stem == "train_resnet20":
        write_cifar10_binary(tmp_path, rows=20)
        arguments = [str(tmp_path), "3"]
    environment = {
        "MUCUDNN_BATCH_SIZE_POLICY": "undivided",
        "MUCUDNN_DATABASE": str(tmp_path / "cache.sqlite"),
    }
    out, _ = python("-W", "error", example, *arguments, environment=environment)
    assert EXPECTED[example.stem] in out
