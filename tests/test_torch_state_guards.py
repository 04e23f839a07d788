"""`StateGuards`: Python state that changed is found, whichever way it is looked at."""

from collections import OrderedDict, defaultdict

import pytest
import torch

from mucudnn.torch.capture.guards import StateGuards
from mucudnn.torch.capture.python_state import MISSING, Kind, Read

pytestmark = pytest.mark.torch


class Plain:
    pass


def read(kind, holder, key=None):
    noted = Read(kind, holder, key, None, f"the {key}")
    return Read(kind, holder, key, noted.now(), f"the {key}")


@pytest.mark.parametrize("made", [dict, OrderedDict, lambda **k: defaultdict(int, k)])
def test_entries_are_compared_until_and_after_a_dict_keeps_changing(made):
    held = made(a=1, b="two", other=object())
    reads = [read(Kind.ENTRY, held, key) for key in ("a", "b", "missing")]
    guards = StateGuards([*reads, read(Kind.SIZE, held)])
    assert reads[-1].value is MISSING
    for i in range(5):  # of no concern, often enough to be compared by entries
        assert guards.failed() == ""
        held["other"] = i
    assert guards.failed() == ""
    held["a"] = 1.0
    assert guards.failed() == "the a changed: 1 -> 1.0"
    assert guards.changed is reads[0]
    held["a"] = int("1")
    assert guards.failed() == ""
    held["missing"] = None
    assert "the missing changed" in guards.failed()
    del held["missing"]
    assert guards.failed() == ""
    held["one_more"] = 3
    assert "the None changed: 3 -> 4" in guards.failed()


@pytest.mark.parametrize("made", [list, tuple, set, lambda v: dict.fromkeys("a", *v)])
def test_equal_contents_are_compared_until_they_differ(made):
    held = [made([1.5])]
    guards = StateGuards([read(Kind.CONTENTS, held), read(Kind.CONTENTS, held[0])])
    for _ in range(3):
        if isinstance(held[0], list | dict):
            held[0][0 if isinstance(held[0], list) else "a"] = float("1.5")
        assert guards.failed() == ""
    assert guards._holds()  # at once, without a look at all state
    held[0] = made([2.5])
    assert "changed" in guards.failed()


def test_what_changed_before_the_guards_were_made_is_found():
    held = {"a": 1}
    noted = read(Kind.ENTRY, held, "a")
    held["a"] = 2
    assert StateGuards([noted]).failed() == "the a changed: 1 -> 2"


def test_a_change_is_reported_until_it_is_undone():
    held = {"a": True}
    guards = StateGuards([read(Kind.ENTRY, held, "a")])
    held["a"] = False
    for _ in range(4):
        assert guards.failed()
    held["a"] = True
    assert guards.failed() == ""


def test_hooks_and_classes_of_many_objects_are_seen():
    tensors = [torch.ones(1, requires_grad=True) for _ in range(3)]
    objects = [Plain() for _ in range(3)]
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    reads = [read(Kind.SLOT, t, key) for t in tensors for key in hooks]
    guards = StateGuards([*reads, *(read(Kind.TYPE, o) for o in objects)])
    assert guards.failed() == ""
    handle = tensors[1].register_hook(lambda g: g)
    assert "_backward_hooks" in guards.failed()
    handle.remove()
    assert guards.failed() == ""
    tensors[2].register_post_accumulate_grad_hook(lambda t: None)
    assert "_post_accumulate_grad_hooks" in guards.failed()
    tensors[2]._post_accumulate_grad_hooks.clear()
    objects[2].__class__ = type("Other", (Plain,), {})
    assert "changed: <class" in guards.failed()
