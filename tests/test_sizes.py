import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.sizes import (
    LARGEST,
    exact_bytes,
    format_bytes,
    format_count,
    parse_bytes,
    parse_integer,
)


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
        ("8G", 8 << 30),
        ("1.5m", 3 << 19),
        ("1TiB", 1 << 40),
        ("0", 0),
        (0, 0),
        (123, 123),
    ],
)
def test_parse(text, nbytes):
    assert parse_bytes(text) == nbytes


REFUSED = {
    r"is not a size; write .* 64MiB": (
        *("", "  ", "MiB", "-1", "-64MiB", "nan", "NaN MiB", "inf", "1e6", "1,5GiB"),
        *("1 2", "٣"),
    ),
    r"unknown unit .* MiB": ("64Mi", "64 Mebi", "5 apples"),
    "bytes, not a fraction": ("0.5", "8", ".75", "1023"),
    "not an integer": (
        *("", " ", "1_000", "٣", "²", "0x10", "1e3", "1.5", "nan", "--1", "1 2"),
    ),
}
"""What is said, and of which texts."""


@pytest.mark.parametrize(
    ("text", "message"), [(t, said) for said, texts in REFUSED.items() for t in texts]
)
def test_texts_that_are_no_numbers_are_told_why(text, message):
    parse = parse_integer if "integer" in message else parse_bytes
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_numbers():
    with pytest.raises(ValueError, match="negative, got -1"):
        parse_bytes(-1)
    for size in (1.5, float("nan"), None):
        with pytest.raises(TypeError, match="a string or an integer"):
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


def test_one_thing_is_singular():
    assert format_count(1, "step") == "1 step"
    assert format_count(0, "step") == "0 steps"
    assert format_count(1, "entry", "entries") == "1 entry"
    assert format_count(1200, "entry", "entries") == "1,200 entries"


@given(
    st.integers(0, 1 << 90),
    st.lists(st.integers(-3, 3) | st.integers(0, 1 << 90), max_size=3),
)
def test_sizes_beside_each_other_differ_when_they_differ(first, others):
    """Also such as are a byte apart; equal ones read the same."""
    sizes = [first, *(first + n if abs(n) <= 3 else n for n in others)]
    sizes = [n for n in sizes if n >= 0]
    texts = [format_bytes(n, *sizes) for n in sizes]
    for n, text in zip(sizes, texts, strict=True):
        for m, other in zip(sizes, texts, strict=True):
            assert (n == m) == (text == other)
    assert format_bytes(first, first) == format_bytes(first)


@pytest.mark.parametrize(
    ("nbytes", "beside", "text"),
    [
        (3_200_000, 3_212_288, "3.05 MiB"),
        (3_212_288, 3_200_000, "3.06 MiB"),
        (1 << 20, (1 << 20) + 1, "1048576 bytes"),
        ((1 << 20) - 1, 1 << 20, "1023.999 KiB"),
        ((1 << 20) - 100, 1 << 20, "1023.9 KiB"),
        (5, 1 << 30, "5 B"),
    ],
)
def test_as_many_digits_as_it_takes(nbytes, beside, text):
    assert format_bytes(nbytes, beside) == text


@given(st.integers(0, 1 << 62))
def test_what_is_formatted_parses_to_about_the_same(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)
    for exact in (nbytes, nbytes << 18):
        assert parse_bytes(f"{exact} B") == parse_bytes(exact) == exact


ZEROS = [25, 30, 400, 5000]


@pytest.mark.parametrize("zeros", ZEROS)
def test_no_size_is_more_than_a_machine_can_address_but_any_can_be_written(zeros):
    digits, nbytes = f"1{'0' * zeros}", 10**zeros
    for size in (nbytes, (1 << 80) + 1, digits, f"{digits}MiB", f"{digits}.5 kB"):
        with pytest.raises(ValueError, match="more than any machine has"):
            parse_bytes(size)
    assert format_bytes(nbytes).endswith(" PiB")
    assert format_bytes(-nbytes) == f"-{format_bytes(nbytes)}"


def test_the_largest_size_is_exact():
    most = 1 << 80
    assert parse_bytes(most) == parse_bytes(str(most)) == most
    assert parse_bytes(f"{most}.{'9' * 400}") == most
    assert parse_bytes(f"0.{'9' * 400} B") == 0


@given(st.integers(-LARGEST, LARGEST))
def test_integers_are_read_back(number):
    assert parse_integer(f" {number} ", least=-LARGEST) == number


@pytest.mark.parametrize("digits", [1, 19, 20, 400, 5000])
def test_an_integer_out_of_range_is_told_the_range(digits):
    with pytest.raises(ValueError, match="the most is 5"):
        parse_integer("9" * digits, most=5)
    with pytest.raises(ValueError, match="the least is -5"):
        parse_integer("-" + "9" * digits, least=-5)
    assert parse_integer("0" * digits + "3", most=5) == 3


def test_bytes_that_are_exact_already_are_given_once():
    assert exact_bytes(1774592) == "1.7 MiB (1774592 bytes)"
    assert exact_bytes(1024) == "1.0 KiB (1024 bytes)"
    assert exact_bytes(1023) == "1023 bytes"
    assert exact_bytes(0) == "0 bytes"
