"""What a step moves, as `python -m bench traffic` counts it."""

import pytest

from bench.traffic import BATCHES, _step


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_moves_half_the_bytes(precision):
    """Though masters and statistics are in float32."""
    wide, half = (
        _step("resnet50", BATCHES["resnet50"], p, True) for p in (None, precision)
    )
    assert half["bytes"] <= wide["bytes"] / 2
    assert half["conv_bytes"] == pytest.approx(wide["conv_bytes"] / 2)
    assert half["flops"] == wide["flops"]


def test_what_is_fused_moves_less_in_fewer_launches():
    apart, fused = (_step("resnet50", 32, None, fuse) for fuse in (False, True))
    assert fused["launches"] < apart["launches"]
    assert fused["least_bytes"] < fused["bytes"] < apart["bytes"]
