"""The environment configures a tuner, and arguments win over it."""

import pytest

from mucudnn.runtime import environment
from mucudnn.runtime.cache import BenchmarkCache
from mucudnn.runtime.tuner import Tuner


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


def test_what_is_made_up_is_not_remembered(home):
    assert Tuner.from_env({}, backend="null").cache.path is None


def test_all_devices(home):
    env = {"MUCUDNN_BENCHMARK_DEVICES": "all"}
    assert len(Tuner.from_env(env, backend="null").benchmark_backends) == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MUCUDNN_BATCH_SIZE_POLICY", "some"),
        ("MUCUDNN_WORKSPACE_LIMIT", "lots"),
        ("MUCUDNN_WORKSPACE_LIMIT", "-1"),
        ("MUCUDNN_TOTAL_WORKSPACE_SIZE", "64M"),
        ("MUCUDNN_BENCHMARK_DEVICES", "first"),
        ("MUCUDNN_BENCHMARK_DEVICES", "0,8"),
        ("MUCUDNN_BENCHMARK_DEVICES", "-1"),
    ],
)
def test_a_bad_variable_is_named(home, name, text):
    with pytest.raises(ValueError, match=name) as caught:
        Tuner.from_env({name: text}, backend="null")
    assert repr(text) in str(caught.value)
