"""Names beside marks: none is lost, none covers another, all are within the frame."""

import xml.etree.ElementTree as ET

from hypothesis import given, strategies as st

from mucudnn.report.svg import Frame, Label, labels

FRAME = Frame(left=0.0, right=400.0, top=10.0, bottom=200.0)
POINTS = st.tuples(st.floats(20, 380), st.floats(20, 190), st.sampled_from("abcdef"))


@given(st.lists(POINTS, max_size=6))
def test_names_are_apart(points):
    wanted = [Label(x, y, name * 5) for x, y, name in points]
    drawn = [ET.fromstring(one) for one in labels(wanted, FRAME)]
    assert sorted(one.text for one in drawn) == sorted(one.text for one in wanted)
    heights = [float(one.get("y")) for one in drawn]
    assert all(FRAME.top <= y <= FRAME.bottom for y in heights)
    spans = [_span(one) for one in drawn]
    for i, (left, right) in enumerate(spans):
        assert FRAME.left - 0.1 <= left
        assert right <= FRAME.right + 0.1
        for j in range(i):
            apart = abs(heights[i] - heights[j]) >= 10.9
            assert apart or spans[j][1] <= left + 0.1 or right <= spans[j][0] + 0.1


def test_a_name_at_the_edge_goes_to_the_other_side_of_its_mark():
    (one,) = labels([Label(395.0, 50.0, "GEMM")], FRAME)
    assert ET.fromstring(one).get("class") == "label end"


def _span(one):
    x, width = float(one.get("x")), len(one.text) * 5.6
    return (x - width, x) if one.get("class").endswith("end") else (x, x + width)


@given(st.lists(POINTS, max_size=4, unique_by=lambda point: round(point[1] / 60)))
def test_names_are_not_on_marks_where_there_is_room(points):
    wanted = [Label(x, y - 6, name * 3, 6.0) for x, y, name in points]
    marks = [(x, y) for x, y, _ in points]
    for one in map(ET.fromstring, labels(wanted, FRAME, marks)):
        left, right = _span(one)
        base = float(one.get("y"))
        for x, y in marks:
            beside = right <= x - 5 or x + 5 <= left
            assert beside or base + 2 <= y - 5 or y + 5 <= base - 8


def test_a_name_that_would_lie_on_another_mark_moves():
    wanted = [Label(100.0, 94.0, "FFT", 6.0)]
    (one,) = labels(wanted, FRAME, [(100.0, 100.0), (112.0, 95.0)])
    assert float(ET.fromstring(one).get("y")) == 87.0  # right above the other
