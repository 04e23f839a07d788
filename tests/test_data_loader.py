"""Loaders of batches, with their transforms."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.data import (
    ArrayDataset,
    Compose,
    Loader,
    Normalize,
    RandomCrop,
    RandomFlip,
    SyntheticDataset,
    channel_statistics,
)
from mucudnn.data.loader import ordered_map
from tests.data_files import labelled_images
from tests.doubles import without_collection
from tests.examples import examples

N = 53
AUGMENT = Compose((RandomCrop(2), RandomFlip()))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert before >= set(threading.enumerate())


class Numbered:
    """Images whose only pixel is their index; `spy` sees every batch read."""

    classes = N
    image_shape = (1, 1, 1)

    def __init__(self, spy=lambda indices: None):
        self.spy = spy

    def __len__(self):
        return N

    def read(self, indices):
        self.spy(indices)
        labels = np.array(indices, np.int64)
        return labels.astype(np.float32).reshape(-1, 1, 1, 1), labels


def labels_of(batches):
    return np.concatenate([batch.labels for batch in batches] or [[]])


def bits_of(batches):
    return [(images.tobytes(), labels.tobytes()) for images, labels in batches]


@given(
    st.integers(1, 53),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(0, 3),
)
@examples(60)
def test_an_epoch_is_a_permutation(batch, shuffle, drop_last, workers, depth, epoch):
    options = {"workers": workers, "depth": depth, "seed": batch}
    loader = Loader(Numbered(), batch, shuffle=shuffle, drop_last=drop_last, **options)
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader)
    assert [len(b.labels) for b in batches[:-1]] == [batch] * (len(batches) - 1)
    labels = labels_of(batches)
    assert len(labels) == (N // batch * batch if drop_last else N)
    assert len(set(labels)) == len(labels)
    assert shuffle or list(labels) == list(range(len(labels)))


@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 9), st.integers(0, 3))
@examples(40)
def test_resuming_is_bit_exact_whatever_the_threads(workers, depth, start, epoch):
    dataset = SyntheticDataset(N, 3, (2, 6, 6))
    plain = Loader(dataset, 6, seed=5, transform=AUGMENT, workers=0)
    other = Loader(dataset, 6, seed=5, transform=AUGMENT, workers=workers, depth=depth)
    whole = bits_of(plain.epoch(epoch))
    assert bits_of(other.epoch(epoch, start=start)) == whole[start:]


def test_epochs_and_seeds_differ_in_order_and_augmentation():
    def bits(seed, epoch, shuffle, transform=AUGMENT):
        dataset = SyntheticDataset(N, 3, (2, 6, 6))
        loader = Loader(dataset, 8, seed=seed, shuffle=shuffle, transform=transform)
        return tuple(bits_of(loader.epoch(epoch)))

    for how in ((True,), (False,), (True, None)):
        assert len({bits(s, e, *how) for s in range(3) for e in range(3)}) == 9
    images = np.tile(np.arange(36, dtype=np.uint8).reshape(1, 6, 6), (8, 1, 1, 1))
    dataset = ArrayDataset(images, np.zeros(8, int))
    first, second = Loader(dataset, 4, transform=AUGMENT, shuffle=False).epoch(0)
    assert (first.images != second.images).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loader(Numbered(), 0),
        lambda: Loader(Numbered(), 4, workers=-1),
        lambda: Loader(Numbered(), 4, depth=0),
        lambda: Loader(Numbered(), 4, seed=-1),
        lambda: Loader(Numbered(), N + 1, drop_last=True),
        lambda: Loader(Numbered(), 4).epoch(-1),
        lambda: Loader(Numbered(), 4).epoch(0, start=15),
        lambda: Loader(Numbered(), 4).epoch(0, start=-1),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ValueError, match=r"must be|full batch|count from"):
        make()


def test_no_more_than_the_depth_is_read_ahead():
    """While batch i is with the consumer, at most i + 1 + ahead have been begun."""
    reads = []
    for workers, depth, ahead in ((1, 1, 1), (1, 3, 3), (3, 2, 3)):
        reads.clear()
        loader = Loader(Numbered(reads.append), 2, workers=workers, depth=depth)
        for i, _ in enumerate(loader.epoch(0)):
            assert len(reads) <= i + 1 + ahead


def test_batches_are_read_before_they_are_asked_for():
    read = threading.Semaphore(0)
    loader = Loader(Numbered(lambda _: read.release()), 2, depth=3)
    batches = loader.epoch(0)
    next(batches)
    for _ in range(4):  # the one taken and three ahead
        assert read.acquire(timeout=300)
    assert not read.acquire(timeout=0.2)  # and no more
    batches.close()


def test_slow_early_batches_do_not_change_the_order():
    """The first result is finished after the third."""
    later = threading.Event()

    def make(job):
        if job == 0:
            assert later.wait(timeout=300)
        elif job == 2:
            later.set()
        return job

    assert list(ordered_map(make, range(20), workers=2, depth=3)) == list(range(20))


class Broken(Numbered):
    def read(self, indices):
        if 30 in indices:
            self.fail()
        return super().read(indices)

    def fail(self):
        raise KeyError("a broken image")


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_exceptions_come_in_their_place_with_their_traceback(workers):
    loader = Loader(Broken(), 10, shuffle=False, workers=workers)
    seen = []
    with pytest.raises(KeyError, match="a broken image") as e:
        seen.extend(batch.labels[0] for batch in loader.epoch(0))
    assert seen == [0, 10, 20]
    names = [frame.name for frame in traceback.extract_tb(e.value.__traceback__)]
    assert names[-2:] == ["read", "fail"]


def test_no_work_is_begun_after_a_failure():
    begun = threading.Semaphore(0)

    def make(job):
        begun.release()
        return 1 // (job - 2)

    results = ordered_map(make, range(9), workers=1, depth=9)
    assert [next(results), next(results)] == [-1, -1]
    for _ in range(3):
        assert begun.acquire(timeout=300)
    assert not begun.acquire(timeout=0.2)
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_workers_pass_on_whatever_is_raised(error):
    def make(job):
        raise error

    with pytest.raises(error):
        next(ordered_map(make, range(3), workers=2, depth=2))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_threads(workers, taken):
    before = set(threading.enumerate())
    batches = Loader(Numbered(), 2, workers=workers).epoch(0)
    assert before >= set(threading.enumerate())  # it is not begun
    for _ in range(taken):
        next(batches)
    batches.close()
    assert before >= set(threading.enumerate())


def test_leaving_the_loop_ends_the_threads():
    before = set(threading.enumerate())
    loader = Loader(Numbered(), 2, workers=3)
    for _ in loader.epoch(0):
        break
    gc.collect()
    assert before >= set(threading.enumerate())

    def fail():
        for _ in loader.epoch(0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert before >= set(threading.enumerate())


def test_garbage_collection_ends_the_threads():
    before = set(threading.enumerate())
    holder = [Loader(Numbered(), 2, workers=3).epoch(0)]
    next(holder[0])
    holder.append(holder)  # only the cycle collector frees it
    assert set(threading.enumerate()) - before
    del holder
    gc.collect()
    assert before >= set(threading.enumerate())


def test_collection_on_a_worker_does_not_wait_for_itself():
    holder = []
    dropped = threading.Event()

    def make(job):
        if job == 1:
            dropped.wait(timeout=300)
            gc.collect()
        return job

    holder.append(ordered_map(make, range(9), workers=1, depth=2))
    holder.append(holder)
    next(holder[0])
    workers = [t for t in threading.enumerate() if t.name.startswith("mucudnn-data")]
    with without_collection():
        del holder
        dropped.set()
        for worker in workers:
            worker.join(timeout=300)
            assert not worker.is_alive()


def test_taken_batches_are_not_kept():
    class Value:
        pass

    values = ordered_map(lambda job: Value(), range(4), workers=1, depth=1)
    first = weakref.ref(next(values))
    gc.collect()
    assert first() is None
    values.close()


SCRIPT = """
import signal, sys, threading
import numpy as np
from mucudnn.data import ArrayDataset, Loader

over = threading.Event()

class Slow(ArrayDataset):
    def read(self, indices):
        if 4 in indices:
            print("waiting", flush=True)
            over.wait({pause})
        return super().read(indices)

dataset = Slow(np.zeros((9, 1, 2, 2), np.uint8), np.arange(9))
batches = Loader(dataset, 1, shuffle=False, workers=2).epoch(0)
"""


@pytest.fixture
def run_script():
    """Starts `SCRIPT` with more to it; what still runs at the end is killed."""
    started = []

    def start(pause, rest):
        code = SCRIPT.format(pause=pause) + textwrap.dedent(rest)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_a_consumer_that_waits(run_script):
    rest = """
    def interrupted(number, frame):
        over.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        for batch in batches:
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    process = run_script(300, rest)
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (out, err, process.returncode) == (b"interrupted\n", b"", 0)


def test_a_script_may_end_with_an_open_epoch(run_script):
    process = run_script(0, "next(batches)")
    _, err = process.communicate(timeout=300)
    assert (err, process.returncode) == (b"", 0)


@given(st.integers(0, 4), st.integers(0, 99), st.sampled_from([np.uint8, np.float32]))
@examples(40)
def test_every_crop_is_a_window_of_the_padded_image(padding, seed, dtype):
    images = labelled_images(5, (2, 6, 7), seed=seed)[0].astype(dtype)
    before = images.copy()
    crops = RandomCrop(padding)(images, np.random.default_rng(seed))
    assert (crops.dtype, crops.shape) == (images.dtype, images.shape)
    assert crops.flags.c_contiguous
    np.testing.assert_array_equal(images, before)
    edges = ((0, 0), (padding, padding), (padding, padding))
    for image, crop in zip(images, crops, strict=True):
        padded = np.pad(image, edges)
        windows = [
            padded[:, top : top + 6, left : left + 7]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
        assert any((window == crop).all() for window in windows)


def test_crops_reach_every_place():
    images = np.zeros((500, 1, 5, 5), np.uint8)
    images[:, 0, 2, 2] = 1
    crops = RandomCrop(1)(images, np.random.default_rng(0))
    places = {tuple(map(int, np.argwhere(crop[0])[0])) for crop in crops}
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips(probability):
    images, _ = labelled_images(2000, (1, 2, 4))
    flips = RandomFlip(probability)(images, np.random.default_rng(0))
    mirrored = (flips == images[..., ::-1]).all(axis=(1, 2, 3))
    same = (flips == images).all(axis=(1, 2, 3))
    assert (mirrored | same).all()
    assert abs(mirrored.mean() - probability) < 0.05


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1e6))
@examples(40)
def test_streaming_statistics_equal_those_of_the_whole(n, batch, offset):
    images = labelled_images(n, (3, 4, 5), seed=n)[0].astype(np.float32)
    images += np.float32(offset)
    dataset = ArrayDataset(images, np.zeros(n, int))
    mean, std = channel_statistics(dataset, batch)
    exact = images.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, exact.std(axis=(0, 2, 3)), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normalised_channels(dtype):
    images, labels = labelled_images(40, (3, 8, 8))
    images[:, 1] = 7  # a constant channel
    normalize = Normalize.of(ArrayDataset(images, labels), dtype)
    values = normalize(images, np.random.default_rng(0))
    assert values.dtype == dtype
    np.testing.assert_allclose(values.mean(axis=(0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(values.std(axis=(0, 2, 3)), [1, 0, 1], atol=1e-5)


def test_the_default_normalisation_is_to_one():
    values = Normalize()(np.full((1, 3, 2, 2), 255, np.uint8), np.random.default_rng())
    np.testing.assert_array_equal(values, np.ones((1, 3, 2, 2), np.float32))


def test_compose_is_in_order():
    images, _ = labelled_images(6, (1, 6, 6))
    crop, flip, normalize = RandomCrop(2), RandomFlip(), Normalize()
    rng = np.random.default_rng(3)
    expected = normalize(flip(crop(images, rng), rng), rng)
    composed = Compose((crop, flip, normalize))(images, np.random.default_rng(3))
    np.testing.assert_array_equal(composed, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomCrop(-1),
        lambda: RandomFlip(1.5),
        lambda: Normalize((0.0, 1.0), (1.0,)),
        lambda: Normalize((0.0,), (-1.0,)),
        lambda: Normalize((), ()),
        lambda: Normalize(dtype="int8"),
        lambda: Normalize((0.0, 1.0), (1.0, 1.0))(np.zeros((1, 3, 2, 2)), None),
    ],
)
def test_bad_arguments_of_transforms(make):
    with pytest.raises(ValueError, match=r"must|from 0 to 1|cannot|choose"):
        make()
