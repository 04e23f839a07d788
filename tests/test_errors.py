"""Errors survive what carries them from one process to another."""

import copy
import multiprocessing
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from mucudnn import errors
from mucudnn.errors import (
    BackendError,
    BackendUnavailableError,
    MucudnnError,
    PlanningError,
    StepFailedError,
    TrainingError,
)

CONSTRUCTED = {
    PlanningError: lambda: PlanningError(
        "no room", node="conv1", short_by=3, least_bytes=512
    ),
    StepFailedError: lambda: StepFailedError("FFT", 3, ValueError("no", 5)),
    TrainingError: lambda: TrainingError("the loss is nan", epoch=2, step=7),
    BackendUnavailableError: lambda: BackendUnavailableError(
        "no library", name="cudnn", path="/lib"
    ),
}
"""Those that take something else than a message."""

KINDS = [getattr(errors, name) for name in errors.__all__]
COPIES = {
    **{
        f"protocol {protocol}": lambda e, p=protocol: pickle.loads(pickle.dumps(e, p))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "python's pickler": lambda e: pickle._loads(pickle._dumps(e)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def made(kind):
    error = CONSTRUCTED.get(kind, lambda: kind("a message", 5))()
    error.extra = ["anything"]
    error.add_note("a note")
    return error


def seen(value):
    """All there is to see, errors within errors included."""
    if not isinstance(value, BaseException):
        return value
    names = [*vars(value), *("name", "path", "msg") * isinstance(value, ImportError)]
    return (
        type(value),
        str(value),
        repr(value.args),
        {name: seen(getattr(value, name)) for name in names},
    )


def test_the_list_is_whole():
    found = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert found == set(KINDS)
    assert all(issubclass(kind, MucudnnError) for kind in KINDS)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives(kind, how):
    error = made(kind)
    found = COPIES[how](error)
    assert found is not error
    assert seen(found) == seen(error)
    assert found.__notes__ == ["a note"]
    assert seen(COPIES[how](found)) == seen(error)


def test_a_copy_shares_what_it_holds_and_a_deep_one_does_not():
    error = made(StepFailedError)
    assert copy.copy(error).reason is error.reason
    assert copy.copy(error).extra is error.extra
    assert copy.deepcopy(error).reason is not error.reason
    assert copy.deepcopy(error).extra is not error.extra


class DemandingError(Exception):
    """Dumps, but its constructor wants more than is loaded."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError

    def __reduce__(self):
        raise TypeError


def locked():
    error = RuntimeError("driver", threading.Lock())
    error.lock = threading.Lock()
    return error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DemandingError(700, "illegal address"),
            "DemandingError: 700: illegal",
        ),
        (locked, "RuntimeError: ('driver', <unlocked"),
        (SilentError, "SilentError"),
        (type("Local", (Exception,), {}), "Local: "),
    ],
)
@pytest.mark.parametrize("how", COPIES)
def test_a_reason_that_cannot_travel(make, words, how):
    reason = make()
    error = StepFailedError.__new__(StepFailedError)
    try:
        error.__init__("FFT", 3, reason)
    except RuntimeError:  # which cannot even be printed
        error.algo, error.done, error.reason = "FFT", 3, reason
    found = COPIES[how](error)
    assert (found.algo, found.done, str(found)) == ("FFT", 3, str(error))
    if found.reason is not reason and type(found.reason) is not type(reason):
        assert type(found.reason) is BackendError
        assert str(found.reason).startswith(words)


def test_reasons_of_reasons():
    error = BackendError("at the bottom")
    for depth in range(6):
        error = StepFailedError(f"A{depth}", depth, error)
    assert seen(pickle.loads(pickle.dumps(error))) == seen(error)
    found = pickle.loads(pickle.dumps(MucudnnError("text", threading.Lock())))
    assert found.args[0] == "text"  # the other cannot travel
    assert found.args[1].startswith("lock: <unlocked")


def fail(kind):
    raise made(kind)


def test_a_pool_of_processes_survives_them():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for kind in (StepFailedError, TrainingError, BackendUnavailableError):
            with pytest.raises(kind) as caught:
                pool.submit(fail, kind).result(timeout=300)
            assert seen(caught.value) == seen(made(kind))
