"""A file is replaced whole and only if it is one. No test touches a real device."""

import contextlib
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from mucudnn.files import check_writable, descriptor_of, read_whole, write_whole
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.checkpoints import Checkpoint, Checkpoints
from tests.commands import done, python, refused

PROBLEM = "n=8,c=3,h=9,w=9,k=4,r=3,s=3"
ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX files")


def directory(path):
    path.mkdir()


def bind_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # whose length is limited


KINDS = {"a directory": directory, "a FIFO": os.mkfifo, "a socket": bind_socket}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused(tmp_path, kind, linked):
    there = tmp_path / "there"
    KINDS[kind](there)
    path = there
    if linked:
        path = tmp_path / "link"
        path.symlink_to(there)
    before = there.stat()
    for write in (check_writable, lambda p: write_whole(p, b"new"), read_whole):
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            write(path)
    assert there.stat().st_ino == before.st_ino
    assert there.stat().st_mode == before.st_mode
    assert path.is_symlink() == linked
    assert len([*tmp_path.iterdir()]) == 1 + linked


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_a_device_is_refused(tmp_path, monkeypatch, kind):
    """A file that says it is a device."""
    path = tmp_path / "device"
    path.write_bytes(b"old")
    real = os.stat

    def fake(asked, **options):
        found = real(asked, **options)
        if Path(asked) != path:
            return found
        return os.stat_result((kind | 0o666, *tuple(found)[1:]))

    monkeypatch.setattr(os, "stat", fake)
    for write in (check_writable, lambda p: write_whole(p, b"new"), read_whole):
        with pytest.raises(OSError, match="it is a device, not a file"):
            write(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_links_are_written_through(tmp_path):
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "target"
    one, two = tmp_path / "one", tmp_path / "two"
    two.symlink_to("far/target")
    one.symlink_to(two)
    for contents in (b"made through a dangling link", b"and then replaced"):
        check_writable(one)
        write_whole(one, contents)
        assert target.read_bytes() == read_whole(one) == contents
        assert one.is_symlink()
        assert two.is_symlink()
    assert [*(tmp_path / "far").iterdir()] == [target]


def test_permissions_stay(tmp_path):
    path = tmp_path / "file"
    usual = os.umask(0o027)
    try:
        write_whole(path, b"new")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        write_whole(path, b"newer")
        assert path.stat().st_mode & 0o777 == 0o604
        if os.geteuid() == 0:
            os.chown(path, 65533, 65534)
            write_whole(path, b"newest")
            assert (path.stat().st_uid, path.stat().st_gid) == (65533, 65534)
    finally:
        os.umask(usual)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/file", "No such file"),
        ("file/below", "Not a directory"),
        ("loop", "symbolic links"),
        ("astray", "No such file"),
        ("a\0b", "no file can be called"),
        ("slash/", "the name of a directory"),
        ("x" * 300, "too long"),
    ],
)
def test_names_that_cannot_be_written(tmp_path, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("nowhere/file")
    before = sorted(tmp_path.iterdir())
    for write in (check_writable, lambda p: write_whole(p, b"")):
        with pytest.raises(OSError, match=message):
            write(f"{tmp_path}/{name}")
    assert sorted(tmp_path.iterdir()) == before


def test_checking_changes_nothing_and_too_large_a_file_is_not_read(tmp_path):
    old = tmp_path / ("\u00e9" * 127)  # a long name
    write_whole(old, b"12345")
    check_writable(old)
    check_writable(tmp_path / "new")
    assert [*tmp_path.iterdir()] == [old]
    assert read_whole(old, most=5) == b"12345"
    with pytest.raises(OSError, match="more than the 4 bytes"):
        read_whole(old, most=4)


def test_an_error_while_writing_leaves_the_old(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fill(file):
        file.write(b"half of")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fill)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


CHILD = """
import os, resource, signal, sys
from mucudnn.files import check_writable, write_whole
path = sys.argv[1]
"""


def child(code, *arguments, status=0, **options):
    return python("-c", CHILD + code, *arguments, status=status, **options)[0]


@pytest.mark.parametrize("most", [0, 100, 70_000])
def test_a_full_disk_leaves_the_old(tmp_path, most):
    path = tmp_path / "file"
    path.write_bytes(b"old" * 50_000)
    code = f"""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
try:
    write_whole(path, b"x" * 100_000)
except OSError as e:
    print(e.strerror)
"""
    found = child(code, path)
    assert found == "File too large\n"
    assert path.read_bytes() == b"old" * 50_000
    assert [*tmp_path.iterdir()] == [path]


def test_a_kill_leaves_the_old(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = """
def fill(file):
    file.write(b"x" * 1_000_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_whole(path, fill)
"""
    child(code, path, status=-signal.SIGKILL)
    assert path.read_bytes() == b"old"
    (draft,) = {*tmp_path.iterdir()} - {path}
    assert draft.match(".file.*.partial")


def test_a_write_protected_file_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    tmp_path.chmod(0o777)
    code = """
os.fchdir(int(sys.argv[2]))
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for write in (check_writable, lambda p: write_whole(p, b"new")):
    try:
        write(path)
    except OSError as e:
        print(e.strerror)
"""
    folder = os.open(tmp_path, os.O_RDONLY)  # those above are not open to everybody
    try:
        found = child(code, "file", folder, pass_fds=[folder])
    finally:
        os.close(folder)
    assert found == "Permission denied\n" * 2
    assert path.read_bytes() == b"old"


def test_open_descriptors_are_streams(tmp_path):
    reader, writer = os.pipe()
    try:
        link = tmp_path / "link"
        link.symlink_to(f"/dev/fd/{writer}")
        for path in (link, f"/proc/self/fd/{writer}", f"/dev/fd/{writer}"):
            assert descriptor_of(path) == writer
            check_writable(path)
            write_whole(path, b"plainly ")
        os.close(writer)
        writer = None
        assert read_whole(f"/dev/fd/{reader}", streams=True) == b"plainly " * 3
        with pytest.raises(OSError, match="it is a FIFO"):
            read_whole(f"/dev/fd/{reader}")
        assert link.is_symlink()
    finally:
        os.close(reader)
        if writer is not None:
            os.close(writer)
    assert descriptor_of(tmp_path / "1") is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_whole("/dev/fd/9999", b"")


# What the commands write


TUNE = ("tune", "--problem", PROBLEM, "--backend", "null")
MEMORY = ("memory", "lenet", "--device", "null", "--batch", "4", "--budget", "1GiB")
WRITERS = {
    "export": ("cache", "export", "{out}", "--cache", "{cache}"),
    "record": (*TUNE, "--cache", "none", "--record", "{out}"),
    "json": (*TUNE, "--cache", "none", "--json", "{out}"),
    "report": (*TUNE, "--cache", "none", "--report", "{out}"),
    "memory report": (*MEMORY, "--report", "{out}"),
    "trace": (*MEMORY, "--trace", "{out}"),
    "snapshot": (*MEMORY, "--snapshot", "{out}"),
}


@pytest.fixture(scope="module")
def some_cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("known") / "cache.sqlite"
    done(*TUNE, "--cache", path)
    return path


@pytest.fixture
def writing(some_cache):
    """Words of a command that writes to a path."""
    return lambda writer, out: [
        word.format(out=out, cache=some_cache) for word in WRITERS[writer]
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_command_writes_through_links(tmp_path, writer, writing):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    done(*writing(writer, link))
    assert link.is_symlink()
    assert target.stat().st_size > 100
    assert target.stat().st_mode & 0o777 == 0o640
    assert [*(tmp_path / "far").iterdir()] == [target]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_command_refuses_what_is_no_file(tmp_path, writer, kind, writing):
    there, link = tmp_path / "there", tmp_path / "link"
    KINDS[kind](there)
    link.symlink_to(there)
    mode = there.stat().st_mode
    for out in (there, link):
        assert f"it is {kind}, not a file" in refused(*writing(writer, out))
    assert there.stat().st_mode == mode
    assert link.is_symlink()


def test_checkpoints_are_written_through_links(tmp_path):
    (tmp_path / "far").mkdir()
    folder = tmp_path / "near"
    folder.mkdir()
    name = "step-00000001.safetensors"
    (folder / name).symlink_to(tmp_path / "far" / name)
    Checkpoints(folder).save(Checkpoint(1, {}, {}, {}))
    assert all(path.is_symlink() for path in folder.iterdir())
    assert [path.name for path in (tmp_path / "far").iterdir()] == [name]
    assert Checkpoints(folder).load({}).step == 1


def test_a_name_of_standard_output_is_standard_output(tmp_path):
    link = tmp_path / "out"
    link.symlink_to("/proc/self/fd/1")
    args = ("cache", "path", "--cache", "none", "--json")
    for path in ("-", "/dev/fd/1", str(link)):
        found, _ = python("-m", "mucudnn", *args, path)
        assert found == '{\n  "schema": 1,\n  "path": "memory"\n}\n'
    assert link.is_symlink()


def test_neither_the_cache_itself_nor_a_newer_recording_is_replaced(
    tmp_path, some_cache, writing
):
    out, before = tmp_path / "out.json", some_cache.read_bytes()
    for name, message in (
        *(("-", "a recording needs a file"), ("/dev/fd/1", "a recording needs a file")),
        (some_cache, "is the cache itself"),
    ):
        assert message in refused("cache", "export", name, "--cache", some_cache)
    assert some_cache.read_bytes() == before
    with BenchmarkCache(some_cache) as found:
        found.export_json(out)
    newer = out.read_bytes().replace(b'"schema": 2', b'"schema": 3')
    out.write_bytes(newer)
    for writer in ("export", "record"):
        line = refused(*writing(writer, out))
        assert "newer version of mucudnn (schema 3" in line
    assert out.read_bytes() == newer
