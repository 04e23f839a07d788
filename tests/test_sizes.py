import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        (" 4096 B ", 4096),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("1.5GiB", 3 << 29),
        (".5 KiB", 512),
        ("8 MB", 8_000_000),
        ("2kB", 2000),
        ("1TiB", 1 << 40),
        ("0", 0),
        (0, 0),
        (123, 123),
    ],
)
def test_parse(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "MiB",
        "-1",
        "-64MiB",
        "nan",
        "NaN MiB",
        "inf",
        "1e6",
        "1,5GiB",
        "1 2",
        "٣",
    ],
)
def test_what_is_not_a_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"is not a size; write .* 64MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["64M", "64 Mebi", "5 apples"])
def test_unknown_units_list_the_known(text):
    with pytest.raises(ValueError, match=r"unknown unit .* MiB"):
        parse_bytes(text)


def test_numbers():
    with pytest.raises(ValueError, match="negative, got -1"):
        parse_bytes(-1)
    for size in (1.5, float("nan"), None):
        with pytest.raises(TypeError, match="text or an integer"):
            parse_bytes(size)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (97622426, "93.1 MiB"),
        (64 << 20, "64.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
        (5 << 60, "5120.0 PiB"),
    ],
)
def test_format(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 62))
def test_what_is_formatted_parses_to_about_the_same(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@given(st.integers(0, 1 << 80))
def test_whole_bytes_are_exact(nbytes):
    assert parse_bytes(str(nbytes)) == parse_bytes(nbytes) == nbytes
