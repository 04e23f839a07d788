"""Image data sets written as they are published, the writers of the tests."""

import gzip
import io
import pickle
import struct

import numpy as np


def labelled_images(n, shape, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return images, np.arange(n) % classes


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder, split="train", n=12, mark="-", packed=False, side=28):
    images, labels = labelled_images(n, (side, side), seed=n)
    prefix = {"train": "train", "test": "t10k"}[split]
    for what, array in (("images", images), ("labels", labels)):
        name = f"{prefix}-{what}{mark}idx{array.ndim}-ubyte"
        raw = idx(array)
        path = folder / (name + (".gz" if packed else ""))
        path.write_bytes(gzip.compress(raw) if packed else raw)
    return images[:, None], labels


def save_python2_str(pickler, text):
    raw = text.encode("latin1") if isinstance(text, str) else text
    if len(raw) < 256:
        pickler.write(b"U" + bytes([len(raw)]) + raw)
    else:
        pickler.write(b"T" + struct.pack("<i", len(raw)) + raw)
    pickler.memoize(text)


def python2_pickle(value):
    """What Python 2 and its NumPy wrote: every text a `str`."""
    file = io.BytesIO()
    pickler = pickle._Pickler(file, protocol=2)
    pickler.dispatch = {
        **pickler.dispatch,
        str: save_python2_str,
        bytes: save_python2_str,
    }
    pickler.dump(value)
    return file.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


def write_cifar10_binary(folder, rows):
    folder.mkdir(exist_ok=True)
    images, labels = labelled_images(6 * rows, (3, 32, 32))
    table = np.concatenate(
        [labels[:, None].astype(np.uint8), images.reshape(6 * rows, -1)], axis=1
    )
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for i, name in enumerate(names):
        (folder / name).write_bytes(table[i * rows : (i + 1) * rows].tobytes())
    text = "".join(f"class {i}\n" for i in range(10)) + "\n"
    (folder / "batches.meta.txt").write_text(text)
    return images, labels


def write_cifar10_pickles(folder, rows, dumps=python2_pickle):
    folder.mkdir(exist_ok=True)
    images, labels = labelled_images(6 * rows, (3, 32, 32))
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(i * rows, (i + 1) * rows)
        value = {
            "batch_label": f"training batch {i + 1} of 5",
            "labels": labels[part].tolist(),
            "data": images[part].reshape(rows, -1),
            "filenames": [f"image_{j}.png" for j in range(rows)],
        }
        (folder / name).write_bytes(dumps(value))
    names = [f"class {i}" for i in range(10)]
    meta = {"num_cases_per_batch": rows, "label_names": names, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(dumps(meta))
    return images, labels


def write_cifar100(folder, rows, binary):
    folder.mkdir(exist_ok=True)
    images, fine = labelled_images(rows, (3, 32, 32), classes=100)
    coarse = fine // 5
    flat = images.reshape(rows, -1)
    if binary:
        table = np.column_stack([coarse, fine, flat]).astype(np.uint8)
        (folder / "train.bin").write_bytes(table.tobytes())
    else:
        value = {
            "filenames": [f"image_{j}.png" for j in range(rows)],
            "batch_label": "training batch 1 of 1",
            "fine_labels": fine.tolist(),
            "coarse_labels": coarse.tolist(),
            "data": flat,
        }
        (folder / "train").write_bytes(python2_pickle(value))
    return images, fine, coarse


def read_all(dataset):
    return dataset.read(range(len(dataset)))


def write_npy(folder, prefix="", n=20, shape=(3, 6, 5), dtype=np.uint8):
    images, labels = labelled_images(n, shape, classes=4)
    np.save(folder / f"{prefix}images.npy", images.astype(dtype))
    np.save(folder / f"{prefix}labels.npy", labels)
    return images, labels
