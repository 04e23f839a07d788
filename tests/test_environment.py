"""The environment configures a tuner, and arguments win over it."""

from pathlib import Path

import pytest

from mucudnn.runtime import environment
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.sqlite_file import CacheWarning
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.suites import parse_problem
from tests.commands import run_code
from tests.doubles import QUICK
from tests.shaky import shaky


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(
        environment, "default_path", lambda: tmp_path / "default.sqlite"
    )
    return tmp_path


def test_argument_before_environment_before_default(home):
    default = Tuner.from_env({}, backend="cpu")
    assert default.workspace_limit == 64 << 20
    assert default.batch_policy == "powers_of_two"
    assert default.total_workspace is None
    assert default.cache.path == (home / "default.sqlite").resolve()
    env = {
        "MUCUDNN_WORKSPACE_LIMIT": "1.5MiB",
        "MUCUDNN_BATCH_SIZE_POLICY": "all",
        "MUCUDNN_TOTAL_WORKSPACE_SIZE": "4096",
        "MUCUDNN_DATABASE": str(home / "mine.sqlite"),
        "MUCUDNN_BENCHMARK_DEVICES": "0,2",
    }
    told = Tuner.from_env(env, backend="null")
    assert told.workspace_limit == 3 << 19
    assert told.batch_policy == "all"
    assert told.total_workspace == 4096
    assert told.cache.path == (home / "mine.sqlite").resolve()
    assert len(told.benchmark_backends) == 2
    cache = BenchmarkCache()
    argued = Tuner.from_env(
        env,
        backend="null",
        workspace_limit="8 kB",
        batch_policy="undivided",
        total_workspace=None,
        cache=cache,
        benchmark_backends=(),
    )
    assert argued.workspace_limit == 8000
    assert argued.batch_policy == "undivided"
    assert argued.total_workspace is None
    assert argued.cache is cache
    assert argued.benchmark_backends == (argued.backend,)


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("MUCUDNN_BATCH_SIZE_POLICY", "powerOfTwo", "batch_policy", "powers_of_two"),
        ("MUCUDNN_BATCH_SIZE_POLICY", "", "batch_policy", "powers_of_two"),
        ("MUCUDNN_WORKSPACE_LIMIT", "0", "workspace_limit", 0),
        ("MUCUDNN_WORKSPACE_LIMIT", "8 MB", "workspace_limit", 8_000_000),
        ("MUCUDNN_TOTAL_WORKSPACE_SIZE", "0", "total_workspace", None),
    ],
)
def test_words_of_the_environment(home, name, text, attribute, value):
    assert getattr(Tuner.from_env({name: text}, backend="null"), attribute) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MUCUDNN_BATCH_SIZE_POLICY", "some"),
        ("MUCUDNN_WORKSPACE_LIMIT", "lots"),
        ("MUCUDNN_WORKSPACE_LIMIT", "-1"),
        ("MUCUDNN_TOTAL_WORKSPACE_SIZE", "64X"),
        ("MUCUDNN_BENCHMARK_DEVICES", "first"),
        ("MUCUDNN_BENCHMARK_DEVICES", "0,8"),
        ("MUCUDNN_BENCHMARK_DEVICES", "-1"),
    ],
)
def test_a_bad_variable_is_named(home, name, text):
    with pytest.raises(ValueError, match=name) as caught:
        Tuner.from_env({name: text}, backend="null")
    assert repr(text) in str(caught.value)


LAYER = parse_problem("n=2,c=3,h=5,w=5,k=2,r=3,s=3")


def test_a_tuner_remembers_in_the_users_cache_directory(home):
    here = Tuner(rule=QUICK)
    assert here.cache.path == (home / "default.sqlite").resolve()
    table = here.measure(LAYER)
    seen = []
    later = Tuner(rule=QUICK, progress=seen.append)
    assert later.measure(LAYER) == table
    assert seen == []


TWICE = """
import mucudnn
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.suites import parse_problem
seen = []
rule = StoppingRule(min_samples=1, max_samples=1)
tuner = mucudnn.Tuner(rule=rule, progress=seen.append)
tuner.plan([parse_problem("n=4,c=3,h=5,w=5,k=2,r=3,s=3")])
print(len(seen))
"""


def test_another_process_need_not_measure_again(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    first, second = (int(run_code(TWICE, environment=environment)) for _ in range(2))
    assert first > 0
    assert second == 0
    assert list(tmp_path.rglob("*.sqlite"))


def test_none_and_what_is_made_up_remember_nothing_on_disk(home):
    tuner = Tuner(cache=None, rule=QUICK)
    tuner.measure(LAYER)
    env = {"MUCUDNN_BENCHMARK_DEVICES": "all"}
    virtual = Tuner.from_env(env, backend="null")
    assert len(virtual.benchmark_backends) == 8
    for one in (
        tuner,
        virtual,
        Tuner.from_env({}, cache=None),
        Tuner(backend=shaky(0)),
    ):
        assert one.cache.path is None
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_a_file_even_of_made_up_times(home, kind):
    file = home / "deep" / "mine.sqlite"
    for backend in ("cpu", "null"):
        assert Tuner(backend=backend, cache=kind(file)).cache.path == file.resolve()


@pytest.mark.parametrize(
    ("cache", "error"), [(3, TypeError), (True, TypeError), (b"x", TypeError)]
)
def test_what_is_no_cache_is_refused(home, cache, error):
    with pytest.raises(error, match=r"cache is .*; give a path, a BenchmarkCache"):
        Tuner(cache=cache)
    with pytest.raises(ValueError, match="empty path"):
        Tuner(cache="")


def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path, monkeypatch):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(environment, "default_path", lambda: in_the_way / "c.sqlite")
    with pytest.warns(CacheWarning, match="in memory only") as caught:
        tuner = Tuner(rule=QUICK)
    assert len(caught) == 1
    tuner.plan([LAYER, LAYER.with_batch(3)])  # and no other: warnings are errors
    assert tuner.cache.path is None
    assert tuner.cache.rows()
