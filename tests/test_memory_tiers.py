"""A forecast over several tiers: rates given, published or measured; who has what."""

import math

import pytest

from mucudnn.passes.estimate import estimate
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.profiling.links import forecast_tiers
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec
from tests.commands import done

STEP = StepSpec(model="resnet20", batch=16)


def study(budget, *tiers, **options):
    return study_memory(
        STEP, policies=["superneurons"], budget=budget, tiers=tiers, **options
    )


@pytest.fixture(scope="module")
def budget():
    free = study_memory(STEP, policies=["keep_all"])
    return int(0.6 * free.unbounded.peak_bytes)


def test_rates_are_given_published_or_measured(tmp_path):
    profile = estimate(STEP.graph(), "h200")
    host, disk, peer, given = forecast_tiers(
        [
            TierChoice.parse(text)
            for text in ("host=1GiB", f"disk:{tmp_path}", "peer:1", "peer:2@5GB")
        ],
        profile,
        measured=False,
    )
    link = profile.out_bytes_per_ms, profile.in_bytes_per_ms
    assert (host.out_bytes_per_ms, host.in_bytes_per_ms) == link
    assert (peer.out_bytes_per_ms, peer.in_bytes_per_ms) == link
    assert (given.out_bytes_per_ms, given.in_bytes_per_ms) == (5e6, 5e6)
    assert 0 < disk.out_bytes_per_ms <= link[0]  # of this machine, over that link
    assert 0 < disk.in_bytes_per_ms <= link[1]
    assert (host.nbytes, peer.nbytes) == (1 << 30, math.inf)
    assert [t.addressable for t in (host, disk, peer)] == [True, True, False]


def test_the_fastest_is_filled_first_and_slower_ones_cost_more(budget, tmp_path):
    alone = study(budget, "host")
    assert alone.placed.plan.prediction.step_ms == pytest.approx(
        study(budget).placed.plan.prediction.step_ms
    )
    used = alone.placed.plan.prediction.placement.used[0]
    assert used > 0
    tiers = (f"host={used // 2}@50GB", f"disk:{tmp_path}@1GB", "peer:1=1MiB@100GB")
    found = study(budget, *tiers)
    placement = found.placed.plan.prediction.placement
    assert [tier.name for tier in placement.tiers] == [
        *("peer:1", "host", f"disk:{tmp_path}")
    ]
    assert all(placement.used)
    for tier, nbytes in zip(placement.tiers, placement.used, strict=True):
        assert nbytes <= tier.nbytes
    slow = study(budget, f"disk:{tmp_path}@0.2GB")
    assert slow.placed.plan.prediction.step_ms > alone.placed.plan.prediction.step_ms
    assert found.to_json()["placed"]["tiers"][0]["name"] == "peer:1"


def test_no_room_says_so(budget):
    found = study(budget, "host=1KiB")
    assert found.placed is None
    assert "host" in found.placement_error


def test_the_command_says_what_goes_where(budget, tmp_path):
    words = ("memory", "resnet20", "--batch", 16, "--policy", "superneurons")
    tiers = ("--tier", "peer:1=1MiB@100GB", "--tier", "host")
    shown = done(*words, "--budget", budget, *tiers)
    assert "to peer:1 (" in shown
    assert "to host (" in shown
    assert "tiers: peer:1 100 GB/s out, 100 GB/s back; host " in shown
