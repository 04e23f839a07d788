"""`mucudnn memory` of a PyTorch model: FILE.py:function."""

import json
import pickle
import sys
from functools import partial

import pytest

import mucudnn
from mucudnn.cli.app import ExitCode
from tests import commands

run = partial(commands.run, "memory")
refused = partial(commands.refused, "memory")

MODEL = """
import torch
from torch import nn


def step():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        example = torch.empty(128, 64), torch.empty(128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, nn.functional.cross_entropy, example, optimizer


def batched(batch):
    model, loss_fn, example, optimizer = step()
    example = [t[:1].expand(batch, *t.shape[1:]) for t in example]
    return model, loss_fn, example, optimizer


def misshapen():
    model, loss_fn, (x, y), optimizer = step()
    return model, loss_fn, (x[:, :5], y), optimizer
"""


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    file = tmp_path / "net.py"
    file.write_text(MODEL)
    return str(file)


@pytest.mark.torch
def test_the_table_and_files_are_as_for_networks(model, tmp_path):
    names = ("a.json", "b.html", "c.json", "d.pickle")
    data, page, trace, snap = (tmp_path / name for name in names)
    result = run(
        *(f"{model}:step", "--budget", "620KiB", "--policy", "keep_all,planned"),
        *("--max-batch", "--min-budget", "--slowdown", "1.05"),
        *("--json", str(data), "--report", str(page)),
        *("--trace", str(trace), "--snapshot", str(snap)),
    )
    assert result.exit_code == 0, result.output
    assert "Sequential, batch 128, 64, AdamW; estimated for" in result.stdout
    found = json.loads(data.read_text())
    assert found["parameters"] == 64 * 256 + 256 + 256 * 10 + 10
    assert found["minimum_bytes"] == found["min_budget_bytes"]["planned"]
    assert found["max_batch"]["planned"] >= found["max_batch"]["keep_all"] > 0
    (best,) = [row for row in found["rows"] if row["best"]]
    assert best["peak_bytes"] <= 620 << 10
    for kind in ("activation", "gradient", "rest"):
        assert f'class="stay {kind}"' in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert pickle.loads(snap.read_bytes())["segments"]

    import mucudnn.torch as mt

    namespace = {}
    exec(MODEL, namespace)
    study = mt.memory(*namespace["step"]())
    assert found["minimum_bytes"] == study.least_budget
    assert found["unbounded_bytes"] == study.unlimited_bytes
    assert found["max_batch"]["planned"] == study.max_batch("620KiB")
    assert found["for_slowdown"]["budget_bytes"] == study.budget_for(slowdown=1.05)
    rates = {row["batch"]: row["samples_per_s"] for row in found["throughput"]}
    assert rates == pytest.approx(study.throughput("620KiB"))


@pytest.mark.torch
def test_a_batch_by_option_or_by_argument(model):
    def minimum(function, batch):
        options = ("--policy", "planned", "--budget", "1GiB", "--json", "-")
        result = run(f"{model}:{function}", "--batch", batch, *options)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["batch"] == int(batch)
        return found["minimum_bytes"]

    assert minimum("step", "64") == minimum("batched", "64") < minimum("step", "256")


@pytest.mark.torch
def test_a_step_in_parts_needs_less(model):
    result = run(
        *(f"{model}:step", "--split", "auto", "--policy", "planned"),
        *("--budget", "1GiB", "--json", "-"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["splitting"]["tried"]

    import mucudnn.torch as mt

    namespace = {}
    exec(MODEL, namespace)
    study = mt.memory(*namespace["step"](), split="auto")
    assert found["minimum_bytes"] == study.least_budget


@pytest.mark.torch
def test_nothing_fits(model):
    result = run(f"{model}:step", "--budget", "1KiB", "--policy", "planned")
    assert result.exit_code == ExitCode.NOTHING_FITS
    assert "the least budget that works is" in result.stderr


@pytest.mark.torch
def test_what_cannot_be_had_is_one_line(model):
    assert "must have same reduction dim" in refused(f"{model}:misshapen")
    assert "no function 'nothing'" in refused(f"{model}:nothing")
    line = refused(f"{model}:step", "--optimizer", "adam")
    assert "--optimizer is for built-in networks" in line
    line = refused(f"{model}:step", "--split", "height")
    assert "its batch has no images" in line
    assert "--image is for" in refused(f"{model}:step", "--image", "32")


def test_a_file_that_is_missing_and_functions_that_return_something_else(tmp_path):
    assert "does not exist" in refused(f"{tmp_path}/none.py:step")
    file = tmp_path / "other.py"
    file.write_text(
        "def three():\n    return 3\n\n\ndef pair():\n    return 1, 'a'\n\n\n"
        "def failing():\n    raise RuntimeError('no luck')\n"
    )
    line = refused(f"{file}:three")
    assert "returned int; it must return (model, loss_fn, example, optimizer)" in line
    assert "returned (int, str); it must return (model" in refused(f"{file}:pair")
    line = refused(f"{file}:failing")
    assert "other.py, line 10: RuntimeError: no luck" in line


def test_without_pytorch_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delattr(mucudnn, "torch", raising=False)  # put back with its modules
    for name in [n for n in sys.modules if n.startswith("mucudnn.torch")]:
        monkeypatch.delitem(sys.modules, name)
    file = tmp_path / "importing.py"
    file.write_text("import torch\n")
    line = refused(f"{file}:step")
    assert "importing.py, line 1: " in line
    assert line.endswith("pip install '.[torch]'")
    file = tmp_path / "bare.py"
    file.write_text("def step():\n    return 1, 2, 3, 4\n")
    line = refused(f"{file}:step")
    assert line.endswith(
        "is a PyTorch model; install PyTorch with: pip install '.[torch]'"
    )


def test_only_a_model_of_pytorch_is_compared():
    assert "--compare is for PyTorch models" in refused("lenet", "--compare")
    line = refused("lenet", "--compare", "--report", "a.html", "--budget", "1GiB")
    assert "cannot be combined with --budget, --report; it takes --batch" in line
