"""`mucudnn memory` as people meet it."""

import json
import pickle
from functools import partial

import pytest

from mucudnn.cli.app import ExitCode
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.residency import policy_names
from tests import commands

pytestmark = pytest.mark.usefixtures("short_searches")

NULL = ("--device", "null", "--batch", "8")
ROW = {
    *("policy", "scheduler", "peak_bytes", "fits", "offloaded_bytes"),
    *("recomputed_nodes", "predicted_ms", "unbounded_ms", "bound_ms", "gap"),
}


run = partial(commands.run, "memory")
done = partial(commands.done, "memory")
data_of = partial(commands.json_of, "memory")


def test_the_json_has_the_promised_keys():
    data = data_of("lenet", *NULL, "--budget", "16MiB")
    assert data["schema"] == 1
    assert (data["model"], data["batch"]) == ("lenet", 8)
    assert data["budget_bytes"] == 16 << 20
    assert sorted(row["policy"] for row in data["rows"]) == sorted(policy_names())
    for row in data["rows"]:
        assert set(row) >= ROW
        assert row["fits"] == (row["peak_bytes"] <= data["budget_bytes"])
    assert data["costs"] == "estimated"
    assert not data["curve"]


def test_the_table_marks_the_best_and_says_what_is_short():
    asked = ("lenet", *NULL, "--policy", "planned,keep_all,lru")
    least = data_of(*asked, "--budget", "1GiB")["minimum_bytes"]
    text = done(*asked, "--budget", str(least))
    lines = text.splitlines()
    assert sum(line.endswith("  best") for line in lines) == 1
    (kept,) = [line for line in lines if line.startswith("keep_all")]
    assert kept.endswith(" short")
    assert f"({least} bytes)" in text
    assert "estimated" in lines[0]
    assert "assumed" in text


def text_and_data(folder, *arguments):
    """What one command prints, and what it writes as JSON."""
    text = done(*arguments, "--json", folder / "out.json")
    return text, json.loads((folder / "out.json").read_text())


def test_a_network_that_only_answers_runs_in_strips_of_one_image(tmp_path):
    asked = ("unet2d", "--device", "null", "--image", "64", "--inference")
    asked += ("--policy", "planned", "--budget", "45MiB")
    text, data = text_and_data(tmp_path, *asked)
    assert data["inference"]
    assert data["batch"] == 1
    assert {t["along"] for t in data["splitting"]["tried"][1:]} == {"height"}
    assert "inference" in text.splitlines()[0]
    assert "momentum" not in text


def test_a_step_may_be_placed_in_mapped_memory(tmp_path):
    asked = ("alexnet", "--batch", "64", "--policy", "lru", "--device", "p100")
    least = data_of(*asked, "--budget", "1GiB", "--min-budget")["min_budget_bytes"][
        "lru"
    ]
    asked += ("--budget", str(int(1.01 * least)), "--placement", "virtual")
    text, data = text_and_data(tmp_path, *asked)
    placed = data["placed"]
    assert placed["mapped_chunks"] > 0
    assert placed["map_ms"] == pytest.approx(0.069 * placed["mapped_chunks"])
    assert placed["arena_bytes"] + placed["resident_bytes"] <= 1.01 * least
    assert "lru in mapped memory (" in text


@pytest.mark.slow
def test_without_a_budget_the_devices_memory_and_a_curve():
    data = data_of("cifar_quick", *NULL, "--policy", "planned,keep_all")
    assert data["budget_bytes"] == 16 << 30
    budgets = [row["budget_bytes"] for row in data["curve"]]
    assert budgets == sorted(budgets, reverse=True)
    assert len(set(budgets)) >= 3
    text = done("lenet", *NULL, "--policy", "planned")
    assert "(100%)" in text


def test_limits_by_bisection_and_files(tmp_path):
    page, trace, snap = (tmp_path / name for name in ("a.html", "b.json", "c.pickle"))
    data = data_of(
        *("lenet", *NULL, "--budget", "16MiB", "--policy", "planned,keep_all"),
        *("--max-batch", "--min-budget"),
        *("--report", str(page), "--trace", str(trace), "--snapshot", str(snap)),
    )
    assert data["max_batch"]["planned"] >= data["max_batch"]["keep_all"] > 8
    assert data["min_budget_bytes"]["planned"] == data["minimum_bytes"]
    assert "<svg" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert pickle.loads(snap.read_bytes())["segments"]


def test_a_budget_for_a_slowdown_and_no_curve(tmp_path):
    asked = ("lenet", *NULL, "--policy", "planned", "--slowdown", "1.05")
    text, data = text_and_data(tmp_path, *asked)
    kept = data["for_slowdown"]
    assert data["minimum_bytes"] <= kept["budget_bytes"]
    assert kept["predicted_slowdown"] <= kept["slowdown"] == 1.05
    assert not data["curve"]
    assert "\nwithin a slowdown of 1.05: " in text
    assert f"({kept['budget_bytes']} bytes)" in text


def test_schedulers_and_orders():
    data = data_of(
        *("lenet", *NULL, "--budget", "16MiB", "--policy", "lru"),
        *("--scheduler", "all", "--order", "depth_first", "--optimizer", "adam"),
    )
    assert {"on_demand", "timed"} <= {row["scheduler"] for row in data["rows"]}
    assert (data["order"], data["optimizer"]) == ("depth_first", "adam")


@pytest.fixture
def recording(tmp_path):
    """Of the first of LeNet's two layers, in all directions, at batch 8."""
    file = tmp_path / "r.json.gz"
    layer = "n=8,c=1,h=28,w=28,k=20,r=5,s=5"
    options = ("--backend", "null", "--cache", "none", "--record", str(file))
    commands.done("tune", "--problem", layer, *options)
    return str(file)


def test_recorded_convolutions_are_not_estimated(recording, tmp_path):
    options = ("lenet", *NULL, "--policy", "keep_all", "--budget", "1GiB")
    before = data_of(*options)
    text, after = text_and_data(tmp_path, *options, "--recording", recording)
    assert before["convolutions"] == {"measured": 0, "estimated": 5, "device": None}
    assert after["convolutions"] == {"measured": 2, "estimated": 3, "device": "null"}
    assert (before["costs"], after["costs"]) == ("estimated", "partly measured")
    assert "convolutions" not in before["figures"]
    assert after["figures"]["convolutions"].startswith("2 of 5 measured on null")
    gained = after["rows"][0]["unbounded_ms"] - before["rows"][0]["unbounded_ms"]
    assert gained == pytest.approx(2 * (8 * 0.4 + 0.1), abs=0.1)
    assert "2 of 5 convolutions measured" in text.splitlines()[0]
    assert "convolutions: 2 of 5 measured on null" in text


def test_the_report_and_the_largest_batch_know_what_is_recorded(recording, tmp_path):
    page = tmp_path / "a.html"
    options = ("--recording", recording, "--recording", recording, "--max-batch")
    asked = ("lenet", *NULL, "--policy", "keep_all", "--budget", "16MiB", *options)
    assert data_of(*asked, "--report", str(page))["max_batch"]["keep_all"] > 8
    assert "2 of 5 convolutions measured" in page.read_text()
    assert "convolutions: 2 of 5 measured on null" in page.read_text()


def test_a_recording_that_is_no_use_is_one_line(recording, tmp_path):
    garbage = tmp_path / "garbage.json"
    garbage.write_text("{}")
    for args, words in (
        (("lenet", *NULL, "--recording", str(garbage)), "not a usable recording"),
        (("lenet", *NULL, "--recording", "/nowhere/r.json"), "cannot be read: No such"),
        (("lenet", *NULL, "--recording", ""), "needs a file"),
        (("alexnet", *NULL, "--recording", recording), "none of this step's 14"),
        (
            ("lenet", "--device", "cpu", "--recording", recording),
            "is for estimated devices, and --device cpu is measured",
        ),
    ):
        result = run(*args)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_the_cpu_is_measured(tmp_path):
    data = data_of(
        *("digits", "--device", "cpu", "--batch", "2", "--policy", "keep_all,lru"),
        *("--budget", "64MiB", "--cache", str(tmp_path / "cache.sqlite")),
    )
    assert data["costs"] == "measured"
    assert all(row["predicted_ms"] > 0 for row in data["rows"])


def test_a_cache_that_is_not_used_is_named_as_such(tmp_path):
    asked = ("lenet", *NULL, "--policy", "lru", "--budget", "1GiB", "--cache")
    assert "--cache is used only" in run(*asked, str(tmp_path / "x.sqlite")).stderr
    assert "--cache" not in run(*asked, "none").stderr


def test_nothing_is_written_where_nothing_fits(tmp_path):
    trace, snap = tmp_path / "t.json", tmp_path / "s.pickle"
    files = ("--trace", str(trace), "--snapshot", str(snap))
    result = run("lenet", *NULL, "--budget", "12 B", "--policy", "lru", *files)
    assert result.exit_code == ExitCode.NOTHING_FITS
    assert " short" in result.stdout
    assert f"nothing is written to {trace}, {snap}" in result.stderr
    assert not trace.exists()
    assert not snap.exists()


@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("--policy", "keep_all", "--scheduler", "adaptive_window"),
        ("--policy", "superneurons,lru", "--scheduler", "all"),
    ],
)
def test_the_advised_budget_fits_and_a_byte_less_ends_with_its_own_code(asked):
    result = run("lenet", *NULL, "--budget", "1KiB", *asked)
    assert result.exit_code == ExitCode.NOTHING_FITS == 4
    (line,) = result.stderr.splitlines()
    assert line.startswith("mucudnn: error: no policy fits 1.0 KiB (1024 bytes); ")
    words, least = line.split("the least budget that works is ")[1].split(" (")
    least = int(least.removesuffix(" bytes)"))
    assert format_bytes(least) == words
    assert run("lenet", *NULL, "--budget", str(least), *asked).exit_code == 0
    less = run("lenet", *NULL, "--budget", str(least - 1), *asked)
    assert less.exit_code == ExitCode.NOTHING_FITS
    assert f"fits {exact_bytes(least - 1)}; " in less.stderr


def test_a_network_that_does_not_fit_undivided_is_told_of_parts():
    asked = ("lenet", *NULL, "--budget", "1KiB", "--policy", "planned")
    whole = run(*asked)
    assert "--split auto, which runs layers in parts, may; without it" in whole.stderr
    parts = run(*asked, "--split", "auto")
    assert parts.exit_code == ExitCode.NOTHING_FITS
    assert "--split" not in parts.stderr


def test_each_precision_takes_its_peak_of_the_device_in_any_case():
    def ms(*options):
        asked = ("alexnet", "--batch", "64", "--policy", "keep_all", "--json", "-")
        found = run(*asked, "--budget", "8GiB", *options)
        assert found.exit_code == 0
        study = json.loads(found.stdout)
        assert study["device"] == "h200"
        return study["rows"][0]["unbounded_ms"]

    assert ms("--device", "H200", "--precision", "bfloat16") < 0.7 * ms()
    none = run("lenet", "--device", "p100", "--precision", "bfloat16")
    assert none.exit_code == ExitCode.BAD_INPUT
    assert "a convolution computes in bfloat16" in none.stderr


def test_a_largest_batch_is_an_answer_and_none_is_not():
    asked = ("lenet", *NULL, "--policy", "keep_all", "--max-batch")
    some, none = (run(*asked, "--budget", size) for size in ("5400000", "1KiB"))
    assert (some.exit_code, none.exit_code) == (0, ExitCode.NOTHING_FITS)
    for result, fits in ((some, True), (none, False)):
        policy, batch = result.stdout.splitlines()[-1].split()
        assert (policy, int(batch) > 0) == ("keep_all", fits)
    assert some.stderr == ""
    assert none.stderr.startswith("mucudnn: error: no policy fits 1.0 KiB (1024 bytes)")


def test_help_says_how_the_command_ends_and_networks_are_listed():
    text = " ".join(done("--help").split())
    ends = f"Exit code: 0 if a technique fits, {ExitCode.NOTHING_FITS} if none does"
    assert ends in text
    assert "resnet50" in done("--list")


def test_a_snapshot_is_within_the_budget(tmp_path):
    file = tmp_path / "s.pickle"
    budget = 3 << 19
    done("digits", *NULL, "--budget", str(budget), "--snapshot", str(file))
    (segment,) = pickle.loads(file.read_bytes())["segments"]
    assert segment["total_size"] <= budget


def test_images_far_too_large_are_refused_without_advice_in_terabytes():
    result = run("lenet", "--device", "p100", "--image", "60000", "--policy", "lru")
    assert result.exit_code == ExitCode.NOTHING_FITS
    assert "of p100: " in result.stderr
    assert "take a smaller --batch or --image" in result.stderr
    assert "TiB" not in result.stderr
    # Larger than the device, it is refused before planning.
    result = run("resnet18", "--image", "3x9999999x9999999", "--device", "h200")
    assert result.exit_code == ExitCode.NOTHING_FITS
    assert "images alone take more than the 131.3 GiB of h200" in result.stderr
