"""Files made to hurt: none ends the process, eats the memory or never ends."""

import gzip
import itertools
import os
import pickle
import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from mucudnn.data import open_arrays, open_cifar10, open_dataset, open_mnist
from mucudnn.data.cifar import read_pickled_dict
from mucudnn.data.files import read_file, shown
from mucudnn.errors import DataError
from tests.commands import python
from tests.data_files import (
    python2_pickle,
    write_cifar10_binary,
    write_cifar10_pickles,
    write_mnist,
    write_npy,
)
from tests.examples import examples

MANY = 300_000
TUPLE = pickle.EMPTY_TUPLE + pickle.TUPLE1 * MANY
LIST = pickle.EMPTY_LIST * MANY + pickle.APPEND * (MANY - 1)
DEEP = {"tuples": TUPLE, "lists": LIST}
TEXT = b"U\x01x"
KEYS = ("labels", "data", "names")

CHILD = """
import resource, sys
from mucudnn.data.cifar import read_pickled_dict
from mucudnn.data import open_dataset
from mucudnn.errors import DataError
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for kind, path in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        if kind:
            open_dataset(f"{kind}:{path}", split="test")
        else:
            read_pickled_dict(Path(path))
    except DataError as e:
        print(e)
"""


def complaints(*files):
    """What is said of files, each with its kind, in a process that they may end."""
    words = [word for kind, path in files for word in (kind, path)]
    options = {"environment": {"OPENBLAS_NUM_THREADS": "1"}}
    out, err = python("-c", CHILD, *words, **options)
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == len(files)
    return lines


def complaint(path, kind=""):
    (line,) = complaints((kind, path))
    return line


def pickled(body):
    return b"\x80\x02" + body + b"."


TOO_DEEP = [
    (b"}" + TUPLE + TEXT + b"s", "a tuple for a key"),
    (b"}(" + TUPLE + TEXT + b"u", "a tuple for a key"),
    (b"(" + TUPLE + TEXT + b"d", "a tuple for a key"),
    (b"}(" + TEXT + TEXT + TUPLE + TEXT + b"u", "a tuple for a key"),
    (b"}" + TEXT + b"}" + TUPLE + TEXT + b"ss", "a tuple for a key"),
    (b"\x8f(" + TUPLE + b"\x90", "an instruction that plain data does not need"),
    (b"(" + TUPLE + b"\x91", "an instruction that plain data does not need"),
    (b"}" + TEXT + TUPLE + b"s", "nested in more than"),
    (b"}" + TEXT + LIST + b"s", "nested in more than"),
    (TUPLE, "expected a pickled dictionary, found tuple"),
    (b"cnumpy\ndtype\n" + TUPLE + b"R", "elements of type"),
    (b"cnumpy\ndtype\n(" + TUPLE + b"tR", "a pickle of plain data"),
    (b"cnumpy\nndarray\n)R(NN" + TUPLE + b"NNtb", "array of something else"),
    (b"}q\x00" + TEXT + b"h\x00s", "nested in more than"),
    (b"}" + TEXT + b"]q\x00h\x00as", "nested in more than"),
]


def test_depth_is_bounded(tmp_path):
    paths = [tmp_path / f"deep{i}" for i in range(len(TOO_DEEP))]
    for path, (body, _) in zip(paths, TOO_DEEP, strict=True):
        path.write_bytes(pickled(body))
    lines = complaints(*(("", path) for path in paths))
    for path, line, (_, message) in zip(paths, lines, TOO_DEEP, strict=True):
        assert line.startswith(f"{path}, byte ")
        assert message in line
        assert len(line) < 600


def test_depth_anywhere_in_a_data_set(tmp_path):
    files = []
    for key, (kind, deep) in itertools.product(KEYS, DEEP.items()):
        folder = tmp_path / f"{key} {kind}"
        folder.mkdir()
        write_cifar10_pickles(folder, 2)
        files.append(folder / ("batches.meta" if key == "names" else "test_batch"))
        body = b"}" + b"".join(
            b"U" + bytes([len(k)]) + k.encode() + deep + b"s"
            for k in ("data", "labels", "label_names")
            if (k == key or key not in ("data", "labels"))
        )
        files[-1].write_bytes(pickled(body))
    for file, line in zip(files, complaints(*(("", f) for f in files)), strict=True):
        assert str(file) in line


def test_labels_that_cannot_be_printed(tmp_path):
    write_cifar10_pickles(tmp_path, 2)
    value = {"data": np.zeros((2, 3072), np.uint8), "labels": [10**5000, 0]}
    path = tmp_path / "test_batch"
    for label in (10**5000, [[[]]], "x" * 10_000, float("nan")):
        path.write_bytes(python2_pickle({**value, "labels": [label, 0]}))
        with pytest.raises(DataError, match=r"test_batch, byte .*\(image 0\)") as e:
            open_cifar10(tmp_path, "test", rows=2)
        assert len(str(e.value)) < 600
    write_cifar10_pickles(tmp_path, 2)
    for name in (5, None, ["deep"], {"a": 1}):
        meta = python2_pickle({"label_names": [name] * 10})
        (tmp_path / "batches.meta").write_bytes(meta)
        with pytest.raises(DataError, match=r"batches\.meta: expected texts for names"):
            open_cifar10(tmp_path, "test", rows=2)
    path.write_bytes(pickle.dumps({10**5000: 1}, 2))
    with pytest.raises(DataError, match="test_batch, byte"):
        read_pickled_dict(path)


def test_a_text_cannot_be_multiplied(tmp_path):
    """A hundred times ten million bytes out of one text."""
    text = b"X" + struct.pack("<I", 10**7) + b"x" * 10**7 + b"q\x01"
    encode = b"c_codecs\nencode\nh\x01U\x06latin1\x86R"
    body = text + b"0](" + encode.replace(b"U\x06latin1", b"X\6\0\0\0latin1") * 100
    path = tmp_path / "bomb"
    path.write_bytes(pickled(body + b"e"))
    assert "more bytes than the file has" in complaint(path)


def test_a_pickle_far_too_large_is_not_read(tmp_path):
    write_cifar10_pickles(tmp_path, 2)
    with (tmp_path / "test_batch").open("r+b") as file:
        file.truncate(1 << 40)
    line = complaint(tmp_path, "cifar10")
    assert "test_batch: it has more than the" in line


codes = st.sampled_from(
    [
        getattr(pickle, n)
        for n in dir(pickle)
        if n.isupper() and isinstance(getattr(pickle, n), bytes)
    ]
)


programs = st.lists(
    codes | st.binary(max_size=3) | st.just(b"}U\x01a"), max_size=12
).map(lambda parts: pickled(b"".join(parts)))


@st.composite
def damaged_pickles(draw):
    raw = bytearray(python2_pickle({"data": np.eye(3, dtype=np.uint8), "labels": [1]}))
    raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@examples(500)
@given(programs | damaged_pickles())
def test_no_pickle_raises_anything_else(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "pickle"
    path.write_bytes(raw)
    try:
        found = read_pickled_dict(path)
    except DataError as e:
        assert str(e).startswith(f"{path}, byte ")  # noqa: PT017 (either is right)
    else:
        assert all(isinstance(key, str) for key in found)


# Headers that claim what is not there


def zip_bomb(head, nbytes):
    """`nbytes` of zeros after a head, packed a thousandfold; the end is a wrong sum."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + zeros * (nbytes >> 24) + packer.flush()


def test_a_packed_bomb_is_not_unpacked(tmp_path):
    write_mnist(tmp_path, "test", packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    honest = gzip.decompress(path.read_bytes())
    path.write_bytes(zip_bomb(honest, 1 << 30))
    line = complaint(tmp_path, "mnist")
    assert line.startswith(f"{path}, byte ")
    assert "expected the end after" in line


def test_dimensions_that_lie(tmp_path):
    raw = struct.pack(">HBB3I", 0, 8, 3, *(2**32 - 1,) * 3) + bytes(100)
    for packed in (False, True):
        folder = tmp_path / f"packed {packed}"
        folder.mkdir()
        write_mnist(folder, "test", packed=packed)
        path = folder / f"t10k-images-idx3-ubyte{'.gz' * packed}"
        path.write_bytes(gzip.compress(raw) if packed else raw)
        line = complaint(folder, "mnist")
        assert line.startswith(f"{path}, byte 116: expected ")


@examples(100)
@given(
    st.lists(st.binary(max_size=300_000), min_size=1, max_size=3),
    st.integers(0, 400_000) | st.none(),
)
def test_gzip_files_come_back_whole(tmp_path_factory, members, most):
    path = tmp_path_factory.getbasetemp() / "members.gz"
    whole = b"".join(members)
    path.write_bytes(b"".join(map(gzip.compress, members)) + bytes(5))
    if most is not None and len(whole) > most:
        with pytest.raises(DataError, match="more than"):
            read_file(path, most)
    else:
        assert read_file(path, most) == whole


def npy(head):
    raw = head.encode().ljust(118 - 10, b" ") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 1, 1, 1), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 3, 2), }",
        "{'descr': '|S0', 'fortran_order': False, 'shape': (4, 1, 1, 1), }",
        "{'descr': '|V0', 'fortran_order': False, 'shape': (4, 1, 1, 1), }",
        "{'descr': [], 'fortran_order': False, 'shape': (4,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-4, -2, 1), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': 8, }",
        "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1, " * 30 + "8), }",
        "(" * 90,
        "[" * 90,
        "-" * 90,
    ],
)
@pytest.mark.parametrize("what", ["images", "labels"])
def test_headers_of_arrays_that_lie(tmp_path, head, what):
    np.save(tmp_path / "images.npy", np.zeros((10, 1, 2, 2), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(10, np.int64))
    (tmp_path / f"{what}.npy").write_bytes(npy(head) + bytes(8))
    with pytest.raises(DataError, match=f"{what}.npy"):
        open_dataset(f"arrays:{tmp_path}")


def test_many_dimensions(tmp_path):
    np.save(tmp_path / "labels.npy", np.zeros(10, np.int64))
    shape = f"({'1, ' * 70})"
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"\0"
    (tmp_path / "images.npy").write_bytes(raw)
    with pytest.raises(DataError, match=r"images\.npy"):
        open_dataset(f"arrays:{tmp_path}")


@pytest.mark.skipif(sys.platform == "win32", reason="needs FIFOs")
def test_a_fifo_is_not_waited_for(tmp_path):
    files = [
        ("mnist", "t10k-images-idx3-ubyte"),
        ("cifar10", "test_batch.bin"),
        ("cifar10", "test_batch"),
        ("arrays", "images.npy"),
        ("folder", "test/a/image.png"),
    ]
    folders = [tmp_path / f"{i}" for i in range(len(files))]
    for folder, (_, name) in zip(folders, files, strict=True):
        (folder / name).parent.mkdir(parents=True)
        os.mkfifo(folder / name)
    kinds = [kind for kind, _ in files]
    lines = complaints(*zip(kinds, folders, strict=True))
    assert all(str(f) in line for f, line in zip(folders, lines, strict=True))


def test_an_image_that_claims_to_be_huge(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        for i in range(5):
            path = tmp_path / name / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            image.new("RGB", (2, 2)).save(path)
    raw = bytearray((tmp_path / "a" / "0.png").read_bytes())
    raw[16:24] = struct.pack(">II", 50_000, 50_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    (tmp_path / "a" / "0.png").write_bytes(raw)
    found = open_dataset(f"folder:{tmp_path}", image=(3, 2, 2))
    with pytest.raises(DataError, match=r"0\.png"):
        found.read(range(len(found)))


def test_messages_stay_short():
    assert shown("x" * 1000) == "x" * 200 + "…"
    assert shown(10**5000) == "a int"
    assert shown([1]) == "[1]"
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list"


def _two_rows(write):
    return lambda folder: write(folder, 2), lambda f: open_cifar10(f, "train", rows=2)


def _digits(packed):
    def write(folder):
        write_mnist(folder, packed=packed, side=9)

    return write, lambda folder: open_mnist(folder, "train")


ARRAYS = write_npy, lambda folder: open_arrays(folder, "train")
CUT = {
    "images.npy": ARRAYS,
    "labels.npy": ARRAYS,
    "data_batch_3.bin": _two_rows(write_cifar10_binary),
    "data_batch_3": _two_rows(write_cifar10_pickles),
    "train-images-idx3-ubyte": _digits(False),
    "train-labels-idx1-ubyte": _digits(False),
    "train-images-idx3-ubyte.gz": _digits(True),
    "train-labels-idx1-ubyte.gz": _digits(True),
}


@pytest.mark.parametrize("name", CUT)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1))
def test_truncation_names_the_file(tmp_path, name, share):
    write, opened = CUT[name]
    write(tmp_path)
    path = tmp_path / name
    raw = path.read_bytes()
    path.write_bytes(raw[: min(len(raw) - 1, int(share * len(raw)))])
    with pytest.raises(DataError) as e:
        opened(tmp_path)
    assert str(e.value).startswith(f"{path}, byte ")
