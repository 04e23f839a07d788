"""A second process begins at once, and no file of the cache does any harm."""

import contextlib
import copy
import gc
import json
import random
import re
import sqlite3
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from mucudnn.ir.schedule import Residency
from mucudnn.runtime.store.measurements import BenchmarkCache, Entries, default_path
from mucudnn.runtime.store.sqlite_file import CacheWarning, RecordFile
from mucudnn.runtime.store.tables import seal
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch import cpu_backend
from mucudnn.torch.conv import fronts
from mucudnn.torch.conv.fronts import ConvolutionChoice, with_fronts
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.plan_program import PlanOptions
from mucudnn.torch.plan_store import (
    PlanStore,
    Unnameable,
    open_plans,
    structure_of,
)
from mucudnn.torch.planning import Planner
from tests.doubles import break_index, places_in
from tests.test_stores_hostile import VALUES
from tests.torch_steps import build

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*profiling.*")]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plans"


def residual_net():
    """A residual block and what it is trained with."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, inputs, width, stride):
            super().__init__()
            self.one = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
            self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
            self.short = nn.Conv2d(inputs, width, 1, stride, bias=False)

        def forward(self, x):
            y = torch.relu(self.norms[0](self.one(x)))
            return torch.relu(self.norms[1](self.two(y)) + self.short(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), Block(8, 16, 2), nn.Flatten())
    model.append(nn.Linear(16 * 8 * 8, 10))
    batch = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, nn.functional.cross_entropy, optimizer, batch


class Counted:
    """Costs that count how often they are asked."""

    def __init__(self):
        self.times = 0

    def __call__(self, lowered):
        self.times += 1
        return measured(lowered)


def planned(folder, budget=None, net=residual_net):
    """A plan, and how often was measured."""
    model, loss_fn, optimizer, batch = net()
    counted = Counted()
    plans = open_plans(folder)
    limit = float("inf") if budget is None else budget
    step = mt.TrainStep(model, loss_fn, optimizer, limit, PlanOptions(counted, plans))
    plan = step.prepare(*batch)
    del step, plans
    gc.collect()  # closes the file
    return plan, counted.times


def rows(folder, query="SELECT kind, key, value FROM entries ORDER BY kind, key"):
    """The rows of a query of a folder's store."""
    with contextlib.closing(sqlite3.connect(folder / "plans.sqlite")) as db:
        return db.execute(query).fetchall()


def change(folder, statement, *arguments):
    """Change a folder's store."""
    with contextlib.closing(sqlite3.connect(folder / "plans.sqlite")) as db:
        db.execute(statement, arguments)
        db.commit()


def small_net(width=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    batch = torch.randn(3, 4), torch.randint(0, 2, (3,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, nn.functional.cross_entropy, optimizer, batch


ALONE = """
import sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads({threads})
from tests.test_torch_plan_cache import planned
from mucudnn.passes.planning import search
from mucudnn.torch import plan_store
search._ROUNDS = ((1, 10),)  # a search that ends soon
def plans_with(budget):
    plan, times = planned({folder!r}, budget)
    print(times, plan.peak_bytes, bool(plan.leaving or plan.recomputed), plan.source)
    return plan
"""

FIRST = """
free = plans_with(None)
plans_with(round(0.9 * free.peak_bytes))
"""

SECOND = """
def never(request):
    raise AssertionError("planned anew")
plan_store.plan_step = never
plans_with({budget})
"""


def alone(code, **words):
    """Run code in a new process: settings that other tests left are in the key."""
    words |= {
        "root": str(Path(__file__).resolve().parent.parent),
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, "-c", (ALONE + code).format(**words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_process_neither_measures_nor_searches(folder):
    both = alone(FIRST, folder=str(folder))
    again = re.search(r"^0 (\d+) True [^\0]*\Z", both, re.MULTILINE)
    assert again  # measurements serve every budget
    peak = int(re.match(r"\d+ (\d+) ", both)[1])
    assert alone(SECOND, folder=str(folder), budget=round(0.9 * peak)) == again[0]


@pytest.mark.parametrize("truncated", [True, False])
def test_a_damaged_or_foreign_file_is_noticed_and_plans_are_made_again(
    folder, truncated
):
    wanted, _ = planned(folder, net=small_net)
    change(folder, "PRAGMA journal_mode = DELETE")  # nothing is left in a log
    path = folder / "plans.sqlite"
    path.write_bytes(path.read_bytes()[:-5000] if truncated else b"PNG" * 99)
    with pytest.warns(CacheWarning, match="starting a new"):
        found, times = planned(folder, net=small_net)
    assert times == 1 or truncated  # some entries may be
    assert found.source == wanted.source
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert planned(folder, net=small_net)[1] == 0  # and it was written anew
    assert len([*folder.glob("*.corrupt-*")]) == 1


@pytest.mark.parametrize(
    "value",
    [
        "substr(value, 1, length(value) - 10)",
        "x''",
        "'[]'",
        "7",
        "CAST(replace(CAST(value AS TEXT), '0', '1') AS BLOB)",
        "(SELECT value FROM entries AS other WHERE other.kind != entries.kind)",
    ],
    ids=["cut", "empty", "text", "number", "changed", "another's"],
)
def test_a_damaged_entry_is_passed_over_and_made_again(folder, value):
    wanted, _ = planned(folder, net=small_net)
    change(folder, f"UPDATE entries SET value = {value}")
    with pytest.warns(CacheWarning, match="ignoring the profile"):
        found, times = planned(folder, net=small_net)
    assert times == 1
    assert found.source == wanted.source
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert planned(folder, net=small_net)[1] == 0  # and it was written anew


def test_an_entry_too_deep_or_no_json_is_passed_over(folder):
    planned(folder, net=small_net)
    for data in (b"[" * 100_000, b"\xff", b"{", b"NaN"):
        for kind, key, _ in rows(folder):
            change(
                folder,
                "UPDATE entries SET value = ? WHERE key = ?",
                *(seal((kind, "", key, 0), data), key),
            )
        with pytest.warns(CacheWarning, match="ignoring the"):
            assert planned(folder, net=small_net)[1] == 1


def test_a_decision_that_leads_elsewhere_is_not_followed(folder):
    wanted, _ = planned(folder, net=small_net)
    with BenchmarkCache(folder / "plans.sqlite") as store:
        ((kind, key),) = [row[:2] for row in rows(folder) if row[0] == "plan"]
        value = store.entries.get(kind, key)
        store.entries.put(kind, key, {**value, "schedule": "0" * 64})
    with pytest.warns(CacheWarning, match="another schedule"):
        found, times = planned(folder, net=small_net)
    assert (found.source, times) == (wanted.source, 0)
    break_index(folder / "plans.sqlite")  # what is whole in a damaged file is kept
    with pytest.warns(CacheWarning, match="2 of its entries are kept"):
        assert planned(folder, net=small_net)[1] == 0
    # Settings that change times are part of the key.
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert planned(folder, net=small_net)[1] == 1
    finally:
        torch.set_num_threads(threads)
    assert planned(folder, net=small_net)[1] == 0


class InMemory:
    """Entries as a store's, whatever was written under their keys."""

    def __init__(self, values):
        self.values = copy.deepcopy(values)
        self.passed_over = {}

    def get(self, kind, key):
        return copy.deepcopy(self.values.get((kind, key)))

    def put(self, kind, key, value):
        self.values[kind, key] = json.loads(json.dumps(value))

    def refuse(self, kind, key, reason):
        self.passed_over[kind, key] = reason


def mutated(rnd, value):
    """Some of it is another, is gone, is there twice, or is more."""
    value = copy.deepcopy(value)
    for _ in range(rnd.choice([1, 1, 2])):
        *path, last = rnd.choice([place for place in places_in(value) if place])
        at = value
        for key in path:
            at = at[key]
        was = at[last]
        match rnd.randrange(5):
            case 0 | 1 if type(was) in (int, float):
                at[last] = was * rnd.choice([0, -1, 2, 1e300]) + rnd.choice([0, 1])
            case 0 | 1 if type(was) is str:
                at[last] = rnd.choice([each.value for each in Residency] + ["timed"])
            case 0 | 1 | 2:
                at[last] = rnd.choice(VALUES)
            case 3:
                del at[last]
            case _ if isinstance(at, dict):
                at["more"] = 1
            case _:
                at.append(copy.deepcopy(rnd.choice(at)))
    return value


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("convolving", [False, True])
def test_what_an_entry_may_hold_is_checked(convolving, monkeypatch):
    """Entries of valid checksums: never a raw error, never a plan beyond the budget."""
    lowered, tuner = captured(residual_net), None
    if convolving:
        rule = StoppingRule(min_samples=1, max_samples=1)
        tuner = Tuner(backend=cpu_backend(), cache=None, rule=rule)
    choice = ConvolutionChoice(tuner)
    known = measured(lowered)
    if convolving:
        known = with_fronts(lowered, known, tuner)
        monkeypatch.setattr(fronts, "with_fronts", lambda *_: known)

    def plan(values, budget=None):
        entries = InMemory(values)
        store = PlanStore(entries)
        profile = choice.profile(lowered, lambda _: known, store)
        planner = Planner(lowered, profile, ())
        return planner.plan(budget or float("inf"), store), entries

    free, _ = plan({})
    budget = round(0.9 * free.peak_bytes)
    first, filled = plan({}, budget)
    assert convolving or first.leaving or first.recomputed
    wanted, again = plan(filled.values, budget)
    assert again.passed_over == {}
    assert again.values == filled.values
    rnd, outcomes = random.Random(0), Counter()
    for _ in range(60):
        key = rnd.choice(sorted(filled.values))
        value = json.loads(json.dumps(mutated(rnd, filled.values[key]), default=str))
        try:
            found, entries = plan({**filled.values, key: value}, budget)
        except PlanningError:  # of more bytes than there are
            assert "node_ms" in value
            continue
        if found.plan.schedule == wanted.plan.schedule:
            outcomes["passed over" if key in entries.passed_over else "same"] += 1
            continue
        # Other measurements, or fewer of them, are none to be told.
        assert "node_ms" in value
        assert found.peak_bytes <= budget
    assert outcomes["passed over"] > 15


def test_graphs_that_differ_in_anything_but_names_are_apart(folder):
    def names_of(net):
        before = set(rows(folder)) if folder.exists() else set()
        planned(folder, net=net)
        return set(rows(folder)) - before

    def wider():
        return small_net(7)

    def renamed():
        model, loss_fn, optimizer, batch = small_net()
        other = nn.Sequential()
        for i, module in enumerate(model):
            other.add_module(f"other{i}", module)
        return other, loss_fn, optimizer, batch

    def sharper():
        model, _, optimizer, batch = small_net()

        def loss_fn(out, target):
            return nn.functional.cross_entropy(out, target, label_smoothing=0.25)

        return model, loss_fn, optimizer, batch

    def heavier():
        model, loss_fn, _, batch = small_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
        return model, loss_fn, optimizer, batch

    assert len(names_of(small_net)) == 2
    assert not names_of(small_net)
    assert not names_of(renamed)
    for other in (wider, sharper, heavier):
        assert len(names_of(other)) == 2


def test_a_read_only_store_serves_without_a_word(folder, monkeypatch):
    wanted, _ = planned(folder, net=small_net)
    change(folder, "UPDATE entries SET used_at = 1")
    usual = RecordFile._connect

    def connect(self, file):
        db = usual(self, file)
        db.execute("PRAGMA query_only = 1")
        return db

    monkeypatch.setattr(RecordFile, "_connect", connect)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        found, times = planned(folder, net=small_net)
    assert (found.source, times) == (wanted.source, 0)


def test_the_store_does_not_grow_without_end(tmp_path):
    with BenchmarkCache(tmp_path / "plans.sqlite") as store:
        entries = Entries(store._file, most=3000)
        keys = [f"{i:064x}" for i in range(8)]
        for i, key in enumerate(keys):
            entries.put("plan", key, "x" * 700)
            change(tmp_path, f"UPDATE entries SET used_at = {i + 1} WHERE key = ?", key)
            if i == 2:
                assert entries.get("plan", keys[0]) is not None  # it is used again
        entries.put("plan", "large", "x" * 3001)
        (left,) = zip(*rows(tmp_path, "SELECT key FROM entries"), strict=True)
        assert set(left) == {keys[0], *keys[-3:]}
        assert entries.summary() == {"plan": (4, 4 * (700 + 2 + 32))}
        assert entries.clear() == 4
        assert entries.summary() == {}


def test_what_a_name_does_not_tell_is_not_remembered():
    lowered = captured(small_net)
    name, call = next(iter(lowered.calls.items()))
    closure = replace(call, function=lambda *args: args)
    other = replace(lowered, calls={**lowered.calls, name: closure})
    with pytest.raises(Unnameable, match="not told by a name"):
        structure_of(other)


def captured(net):
    """The graph of its step."""
    model, loss_fn, optimizer, batch = net()
    found = []
    mt.TrainStep(
        model,
        loss_fn,
        optimizer,
        float("inf"),
        PlanOptions(lambda lowered: found.append(lowered) or measured(lowered)),
    ).prepare(*batch)
    return found[0]


def test_faces_take_a_cache(folder):
    model, loss_fn, optimizer, batch = small_net()
    mt.train_step(model, loss_fn, optimizer, cache=folder).prepare(*batch)
    assert [row[0] for row in rows(folder)] == ["plan", "profile"]
    mt.train_step(model, loss_fn, optimizer).prepare(*batch)
    with BenchmarkCache(default_path()) as store:
        before = store.entries.summary()
        assert {*before} >= {"plan", "profile"}
        other, _, its, _ = small_net(9)
        mt.train_step(other, loss_fn, its, cache=None).prepare(*batch)
        assert store.entries.summary() == before


def test_a_compiled_model_is_planned_once(folder, monkeypatch):
    name, loss_fn, batch = "mlp", None, None
    model, loss_fn, batch = build(name)
    first = mt.backend(budget="4MiB", cache=folder)
    loss_fn(torch.compile(model, backend=first)(batch[0]), batch[1]).backward()
    torch._dynamo.reset()

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr("mucudnn.torch.costs.measure.costs_of", never)
    second = mt.backend(budget="4MiB", cache=folder)
    loss_fn(torch.compile(model, backend=second)(batch[0]), batch[1]).backward()
    torch._dynamo.reset()
    assert [p.source for p in second.plans] == [p.source for p in first.plans]
