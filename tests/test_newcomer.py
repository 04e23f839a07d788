"""The public API as somebody new to it calls it: wrong types, wrong values, words.

Each call works, or fails with one sentence of ours; never with one of Python's about
the inside.
"""

import functools
import inspect
import math
import pathlib
import re
import warnings

import numpy as np
import pytest

import mucudnn
from mucudnn import data, models
from mucudnn.errors import MucudnnError
from mucudnn.ir import initializers, optimizers
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.numerics import Numerics
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.microbatch import candidate_batches
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.studies.memory_results import StepSpec

X = np.ones((2, 3, 8, 8), np.float32)
W = np.ones((4, 3, 3, 3), np.float32)
DY = np.ones((2, 4, 6, 6), np.float32)
IMAGES = np.ones((8, 1, 8, 8), np.float32)
LABELS = np.arange(8) % 4

ANYTHING = (
    *(None, True, "", "x", "3", -1, 0, 1, 3, 2.5, math.nan, math.inf, b"x", 1j),
    *(np.int64(2), np.float32(0.5), np.array(2), np.array([1, 2]), np.array(["a"])),
    *((), (1,), [1, 1], ["a", "b"], {"a": 1}, {1, 2}, object()),
    *(pathlib.Path("nowhere"), lambda: None, lambda *a, **k: "x", GraphBuilder),
)

OF_PYTHON = re.compile(
    r"unsupported operand|not supported between|has no attribute|object is not|"
    r"unhashable|cannot unpack|not enough values|too many values|must be real number|"
    r"object cannot be interpreted|invalid literal|could not convert|"
    r"truth value|'NoneType'|cannot convert|out of range for|list index|"
    r"zip\(\)|expected str, bytes or os.PathLike|broadcast|sequence (index|item)|"
    r"expected str instance|Cannot interpret|data type .* not understood|ufunc|"
    r"subscriptable|can't multiply|must be str, not|only .* arrays can|"
    r"should be an instance|not iterable|math domain|no len\(\)"
)


def calling(function, *given, like=None, **options):
    """A call that works: a function, its arguments by position and by name.

    Options that are not given have the defaults of the function, or of one like it.
    """
    parameters = list(inspect.signature(like or function).parameters.values())
    for parameter in parameters[len(given) :]:
        if parameter.default is not parameter.empty:
            options.setdefault(parameter.name, parameter.default)
    return function, given, options


def layer(name, *given, **options):
    """A layer of a builder, with fresh tensors."""

    def call(*values, **named):
        g = GraphBuilder()
        g.input("x", (2, 4, 8, 8))
        g.input("y", (2, 4, 8, 8))
        g.input("f", (2, 5))
        g.input("label", (2,), "int64")
        return getattr(g, name)(*values, **named)

    return calling(call, *given, like=getattr(GraphBuilder(), name), **options)


def dataset():
    return data.ArrayDataset(IMAGES, LABELS)


@functools.cache
def trainer():
    digits = models.get_model("digits")
    graphs = [digits(4, classes=4, training=flag) for flag in (True, False)]
    return Trainer(*graphs, tuner=mucudnn.Tuner(backend="null"), optimizer="sgd")


def stepped(images, labels):
    return trainer().step(images, labels)


def evaluated(batches):
    return trainer().evaluate(batches)


def predicted(images):
    return trainer().predict(images)


def written(path):
    return trainer().save_weights(path)


def read_back(path):
    trainer().save_weights("weights")
    return trainer().load_weights(path)


def fitted(*values, **options):
    return fit(trainer(), *values, **options)


def specified(**options):
    return StepSpec(**options).graph()


def epoch(epoch, start):
    return list(data.Loader(dataset(), 4).epoch(epoch, start))


def subset(dataset, indices):
    return data.Subset(dataset, indices)


CALLS = {
    "parse_bytes": calling(parse_bytes, "1MiB"),
    "ConvProblem": calling(
        ConvProblem, direction="forward", x_shape=X.shape, w_shape=W.shape
    ),
    "conv2d": calling(mucudnn.conv2d, X, W),
    "conv_backward_data": calling(mucudnn.conv_backward_data, DY, W, X.shape),
    "conv_backward_filter": calling(mucudnn.conv_backward_filter, X, DY, W.shape),
    "candidate_batches": calling(candidate_batches, 4, "all"),
    "get_backend": calling(mucudnn.get_backend, "cpu"),
    "BenchmarkCache": calling(lambda path: BenchmarkCache(path).close(), None),
    "MemoryBudget": calling(MemoryBudget, nbytes="1MiB", disk=pathlib.Path()),
    "Trainer": calling(
        Trainer,
        models.get_model("digits")(4),
        tuner=mucudnn.Tuner(backend="null"),
        optimizer="sgd",
    ),
    "step": calling(stepped, IMAGES[:4], LABELS[:4]),
    "evaluate": calling(evaluated, data.Loader(dataset(), 4)),
    "predict": calling(predicted, IMAGES),
    "save_weights": calling(written, "weights"),
    "load_weights": calling(read_back, "weights"),
    "fit": calling(
        fitted,
        data.Loader(dataset(), 4),
        like=functools.partial(fit, None),
        epochs=1,
        max_steps=1,
    ),
    "StepSpec": calling(
        specified, like=StepSpec, model="lenet", batch=2, optimizer="sgd"
    ),
    "get_model": calling(models.get_model, "lenet"),
    "model": calling(models.get_model("digits"), 2, image=8),
    "GraphBuilder": calling(GraphBuilder),
    "input": layer("input", "z", (2, 3)),
    "parameter": layer("parameter", "w", (2, 3), initializers.Constant(0.0)),
    "build": layer("build", "x"),
    "conv": layer("conv", "x", 4, 3),
    "conv_transpose": layer("conv_transpose", "x", 4, 3, stride=2, output_padding=1),
    "bias": layer("bias", "x"),
    "linear": layer("linear", "f", 3),
    "max_pool": layer("max_pool", "x", 2, 2),
    "avg_pool": layer("avg_pool", "x", 2, 2),
    "global_avg_pool": layer("global_avg_pool", "x"),
    "batch_norm": layer("batch_norm", "x"),
    "group_norm": layer("group_norm", "x", 2),
    "layer_norm": layer("layer_norm", "x"),
    "lrn": layer("lrn", "x"),
    "relu": layer("relu", "x"),
    "leaky_relu": layer("leaky_relu", "x"),
    "dropout": layer("dropout", "x"),
    "add": layer("add", "x", "y"),
    "scale": layer("scale", "x", 2.0),
    "cast": layer("cast", "x", "float64"),
    "concat": layer("concat", ["x", "y"]),
    "slice": layer("slice", "x", (0, 0, 0, 0), (1, 1, 1, 1)),
    "pad": layer("pad", "x", (0, 0, 0, 0), (0, 0, 1, 1)),
    "reshape": layer("reshape", "x", (2, 4, 64)),
    "flatten": layer("flatten", "x"),
    "upsample_nearest": layer("upsample_nearest", "x", 2),
    "softmax_cross_entropy": layer("softmax_cross_entropy", "f", "label"),
    "mean_squared_error": layer("mean_squared_error", "x", "y"),
    "accuracy": layer("accuracy", "f", "label"),
    "Sgd": calling(optimizers.Sgd),
    "Adam": calling(optimizers.Adam),
    "parse_optimizer": calling(optimizers.parse_optimizer, "adam"),
    "StepRate": calling(optimizers.StepRate, 0.1, (10, 20)),
    "CosineRate": calling(optimizers.CosineRate, 0.1),
    "parse_learning_rate": calling(optimizers.parse_learning_rate, "step:3,6", 0.1),
    "Numerics.parse": calling(Numerics.parse, "strict"),
    "Constant": calling(initializers.Constant, 1.0),
    "Normal": calling(initializers.Normal, 1.0),
    "ArrayDataset": calling(data.ArrayDataset, IMAGES, LABELS, classes=4),
    "SyntheticDataset": calling(data.SyntheticDataset, 8, classes=4),
    "open_dataset": calling(data.open_dataset, "synthetic:length=8", image=(3, 8, 8)),
    "open_arrays": calling(data.open_arrays, "nowhere", "train"),
    "open_mnist": calling(data.open_mnist, "nowhere", "train"),
    "open_cifar10": calling(data.open_cifar10, "nowhere", "train"),
    "open_folder": calling(data.open_folder, "nowhere", "train", (3, 8, 8)),
    "open_digits": calling(data.open_digits, "train"),
    "Loader": calling(data.Loader, dataset(), 4),
    "epoch": calling(epoch, 0, 0),
    "Subset": calling(subset, dataset(), [0, 1]),
    "read": calling(lambda indices: dataset().read(indices), [0, 1]),
    "Resized": calling(data.Resized, dataset(), (1, 4, 4)),
    "RandomCrop": calling(data.RandomCrop, 2),
    "RandomFlip": calling(data.RandomFlip),
    "Checkpoints": calling(Checkpoints, "nowhere", keep=2),
}

CASES = [
    (name, key)
    for name, (_, given, options) in CALLS.items()
    for key in (*range(len(given)), *options)
]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Whatever a call makes, it makes in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "cache.sqlite"))


def complaint(call, given, options):
    """What is wrong with how a call fails; None if it works, or fails as it should."""
    try:
        call(*given, **options)
    except (ValueError, TypeError, IndexError, MucudnnError) as e:
        text = str(e)
        if isinstance(e, IndexError) and "index" not in text and "indices" not in text:
            return f"{type(e).__name__}: {text}"
        if OF_PYTHON.search(text) or len(text) < 12:
            return f"{type(e).__name__}: {text}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


@pytest.mark.parametrize(("name", "key"), CASES, ids=lambda value: str(value))
def test_whatever_is_passed_works_or_is_told_in_a_sentence(name, key):
    call, given, options = CALLS[name]
    found = {}
    for value in ANYTHING:
        values, named = list(given), dict(options)
        (values if isinstance(key, int) else named)[key] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (why := complaint(call, values, named)) is not None:
                found[repr(value)[:40]] = why
    assert not found, "\n".join(f"{k} -> {v}" for k, v in found.items())


@pytest.mark.parametrize("name", CALLS)
def test_what_is_right_works(name):
    call, given, options = CALLS[name]
    if name in ("open_arrays", "open_mnist", "open_cifar10", "open_folder"):
        with pytest.raises(MucudnnError, match="nowhere"):
            call(*given, **options)
    else:
        call(*given, **options)
