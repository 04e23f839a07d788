"""What races found is kept with all measurements: later processes choose alike."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mucudnn.errors import CheckpointError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.numerics import TF32
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.history import recall_races
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.measured_choices import KernelRaces
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.commands import python
from tests.cuda_emulator import COMPILER
from tests.cuda_work import layer
from tests.test_conv_epilogue import race as epilogue_race
from tests.test_cuda_training import stand_in
from tests.test_library_race import Library, backend_of, named, network
from tests.training_cases import Epochs, examples, tuner_of

GPU, OPS = "gpu/1", {"avg_pool", "avg_pool_grad"}
WIDE = MemoryBudget(nbytes=1 << 30)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "perf.sqlite"


def later(ms, cache, graph=None, budget=None, **changed):
    """As a new process has it: a library that nobody has timed, and a graph."""
    library = Library(OPS, ms)
    vars(library).update(changed)
    tuner = tuner_of(backend_of(library), cache=cache)
    graph = graph or training_graph(network(4))
    found = named(KernelRaces(tuner, budget).with_library(graph))
    return found, library.asked, tuner


def test_a_later_process_does_not_race_and_chooses_alike(file):
    first, asked, _ = later(0.5, file)
    assert len(first) == 4
    assert asked
    assert later(2.0, file)[:2] == (first, [])
    assert later(2.0, file, budget=WIDE)[:2] == (first, [])
    file.unlink()
    assert later(2.0, file)[0] == set()
    assert later(0.5, file)[:2] == (set(), [])


SCRIPT = """
import sys
from tests.test_racing import later
found, asked, _ = later(2.0, sys.argv[1])
print(*sorted(found), len(asked))
"""


def test_another_process_in_fact(file):
    first, asked, _ = later(0.5, file)
    *second, none = python("-c", SCRIPT, file)[0].split()
    assert second == sorted(first)
    assert len(first) == 4
    assert len(asked) > int(none) == 0


def pools(shape=(4, 3, 8, 8), dtype="float32", layout="NCHW", count=True, kernel=3):
    g = GraphBuilder(dtype=dtype)
    x = g.avg_pool(g.input("x", shape), kernel, 1, 1, count_include_pad=count)
    graph = g.build(x)
    tensors = {k: replace(t, layout=layout) for k, t in graph.tensors.items()}
    return replace(graph, tensors=tensors)


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (5, 3, 8, 8)},
        {"dtype": "float16"},
        {"layout": "NHWC"},
        {"count": False},
        {"kernel": 2},
    ],
)
def test_what_is_another_in_one_thing_is_raced_anew(other, file):
    ours = pools()
    assert len(later(0.5, file, ours)[0]) == 1
    assert later(2.0, file, ours)[1] == []
    if other.get("layout") == "NHWC":  # as a kernel is told it, not the node alone
        found, asked, _ = later(2.0, file, pools((4, 8, 8, 3), **other))
    else:
        found, asked, _ = later(2.0, file, pools(**other))
    assert (found, bool(asked)) == (set(), True)
    assert len(BenchmarkCache(file).races()) == 2


def test_another_library_or_device_is_raced_anew(file):
    ours = pools()
    assert later(0.5, file, ours)[0]
    assert later(2.0, file, ours, name="another")[1]
    library = Library(OPS, 2.0)
    backend = backend_of(library)
    device = backend.device
    device.fingerprint = "another card, or the same with another library"
    assert not named(KernelRaces(tuner_of(backend, cache=file)).with_library(ours))
    assert library.asked
    known = {race.fingerprint for race in BenchmarkCache(file).races()}
    assert len(known) == 2
    assert later(9.0, file, ours)[:2] == later(0.5, file, ours)[:2]


def test_what_could_not_be_timed_is_not_remembered(file):
    assert later(0.5, file, budget=MemoryBudget(nbytes=64))[0] == set()
    refusing, asked, _ = later(0.5, file, refuses=True)
    assert (refusing, bool(asked)) == (set(), True)
    assert BenchmarkCache(file).races() == ()
    assert len(later(0.5, file)[0]) == 4


def test_what_a_process_knows_goes_into_each_of_its_caches(file):
    """A later one has the file alone, and has to choose alike."""
    library, graph = Library(OPS, 0.5), training_graph(network(4))
    backend = backend_of(library)
    first = KernelRaces(tuner_of(backend)).with_library(graph)
    count, library.ms = len(library.asked), 2.0
    again = KernelRaces(tuner_of(backend, cache=file)).with_library(graph)
    assert named(again) == named(first)
    assert len(library.asked) == count
    assert later(2.0, file)[:2] == (named(first), [])


def test_what_another_process_found_meanwhile_counts(file):
    tuner, raced = Tuner(cache=file), {"op": "any"}

    def measure():
        with BenchmarkCache(file) as theirs:
            text, name = json.dumps(raced), tuner.backend.device.fingerprint
            assert theirs.put_race(name, text, (1.0, 2.0)) == (1.0, 2.0)
        return 2.0, 1.0

    known, used = {}, {}
    races = KernelRaces(tuner, used=used)
    assert races.times_of(raced, known, measure) == (1.0, 2.0)
    assert known == used
    assert set(known.values()) == {(1.0, 2.0)}


@pytest.mark.parametrize(
    "other", [{"algo": "other"}, {"math_mode": TF32}, {"workspace": 128}]
)
def test_an_epilogue_is_raced_once_for_a_plan(other, file):
    problem = layer(3)
    assert epilogue_race(0.5, problem, file)[1].offers_epilogue(problem, "float32")
    backend, found = epilogue_race(9, problem, file)
    assert found.offers_epilogue(problem, "float32")
    assert not backend.epilogues.shapes
    (kept,) = BenchmarkCache(file).races()
    assert kept.times_ms == (0.5, 2)
    (row,) = found.plans[problem].steps
    plans = {problem: ConvPlan(problem, (replace(row, **other),))}
    tuner = Tuner(backend=backend, cache=file)
    assert not KernelRaces(tuner, None, plans).offers_epilogue(problem, "float32")
    larger = layer(4)
    assert not epilogue_race(9, larger, file)[1].offers_epilogue(larger, "float32")
    assert len(BenchmarkCache(file).races()) == 3


# Checkpoints.


def checkpointed(file, ms, folder, resumed=None):
    """One step, and a checkpoint of it; what the library computes, and is asked."""
    library = Library(OPS, ms)
    tuner = tuner_of(backend_of(library), cache=file)
    found = None if resumed is None else Checkpoints(resumed).load({})
    if found is not None:
        recall_races(found, tuner)
    made = Trainer(network(8), tuner=tuner, optimizer="sgd")
    asked = len(library.asked)
    kept, steps = Checkpoints(folder), 1 if found is None else 2
    fit(made, Epochs(16, 8), epochs=1, max_steps=steps, resume=found, checkpoints=kept)
    return named(made.graph), asked, kept.load({})


def test_a_checkpoint_goes_on_with_the_same_kernels_by_any_cache(tmp_path):
    """By none, and by one that says otherwise; then the cache says the same, too."""
    first, asked, kept = checkpointed(tmp_path / "a.sqlite", 0.5, tmp_path / "a")
    assert len(first) == 4
    assert asked
    assert len(kept.progress["races"]) == 4
    other = tmp_path / "b.sqlite"
    assert later(2.0, other, training_graph(network(8)))[0] == set()
    for name, file in (("b", None), ("c", other)):
        more_of = tmp_path / name
        again, asked, more = checkpointed(file, 2.0, more_of, tmp_path / "a")
        assert (again, asked) == (first, 0)
        assert more.progress["races"] == kept.progress["races"]
    assert later(2.0, other, training_graph(network(8)))[:2] == (first, [])


def test_races_of_another_device_are_not_recalled(tmp_path):
    *_, kept = checkpointed(None, 0.5, tmp_path)
    kept = replace(kept, progress={**kept.progress, "device": "another"})
    tuner = tuner_of()
    recall_races(kept, tuner)
    assert tuner.cache.races() == ()


@pytest.mark.parametrize(
    ("races", "message"),
    [
        ("rubbish", "races: 'rubbish' is not an array"),
        ([5], r"races\[0\]: 5 is not an object"),
        ([{"raced": "a", "first_ms": 1.0}], r"races\[0\]"),
        ([{"raced": "a", "first_ms": 1.0, "second_ms": -1.0}], "second_ms: -1.0"),
    ],
)
def test_a_checkpoint_with_other_races_makes_no_sense(races, message, tmp_path):
    *_, kept = checkpointed(None, 0.5, tmp_path)
    kept = replace(kept, progress={**kept.progress, "races": races})
    with pytest.raises(CheckpointError, match=message):
        recall_races(kept, tuner_of())


# Whole steps over the stand-in.


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
@pytest.mark.slow
def test_a_training_on_the_device_goes_on_with_the_same_kernels(file, monkeypatch):
    """Another clock would choose others, by other last bits."""
    images, labels = examples(16)

    def losses(theirs_ms, ours_ms):
        _, gpu = stand_in(monkeypatch)
        library, device = gpu.library_kernels._session.calls, gpu.device
        monkeypatch.setattr(device, "begin", lambda launches=1: len(library.ran))
        monkeypatch.setattr(device, "record", lambda: len(library.ran))
        timed = lambda a, b: theirs_ms if b > a else ours_ms  # noqa: E731
        monkeypatch.setattr(device, "elapsed_ms", timed)
        tuner = tuner_of(gpu, cache=file)
        made = Trainer(network(8), tuner=tuner, optimizer="momentum")
        rows = [slice(8 * i, 8 * i + 8) for i in range(2)]
        found = [float(made.step(images[r], labels[r]).loss) for r in rows]
        return np.array(found), named(made.graph)

    first, chosen = losses(1.0, 2.0)
    again, same = losses(2.0, 1.0)
    assert chosen == same
    assert len(chosen) > 5
    assert np.array_equal(first, again)
