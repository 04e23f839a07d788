import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.data import (
    ArrayDataset,
    Compose,
    Normalize,
    RandomCrop,
    RandomFlip,
    channel_statistics,
)
from tests.data_files import labelled_images
from tests.examples import examples


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
def test_bad_arguments(make):
    with pytest.raises(ValueError, match=r"must|from 0 to 1|cannot|choose"):
        make()
