"""`archive.py pack WORK OUT`, `archive.py unpack ARCHIVE WORK`: results as one file.

What a run leaves is one archive, and beside it the two files that people read first. An
archive that would grow too large to be sent goes on in a second one; each is whole by
itself. What is unpacked may come from anywhere: only plain files with plain names do.

Run as a file, with the standard library alone, also where a part was killed.
"""

import contextlib
import gzip
import io
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

ARCHIVE = "gpu-results.tar.gz"
SUMMARY = "summary.json"
LOG = "gpu.log"

MOST_BYTES = 15 << 20
"""Of one archive, compressed."""

_MOST_UNPACKED = 1 << 30
_LEFT_OUT = ("cache.sqlite",)
"""Begins what stays behind: the recordings hold it all."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STEM = ARCHIVE.partition(".")[0]
_VOLUME = re.compile(rf"{_STEM}(?:-(\d+))?\.tar\.gz")


def pack(work: Path, out: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Write every result into archives; each appears complete or not at all.

    Args:
        work: Where results are, as plain files.
        out: Where archives go, with a copy of the summary.
        most_bytes: Of one archive; a single file that takes more gets one of its own.
    """
    contents = _contents(work)
    if (log := _read(out / LOG)) is not None:
        contents[LOG] = log
    written = []
    for number, names in enumerate(_shared_out(contents, most_bytes), start=1):
        file = out / (ARCHIVE if number == 1 else f"{_STEM}-{number}.tar.gz")
        _replace(file, _archive({name: contents[name] for name in names}))
        written.append(file)
    for stale in volumes(out / ARCHIVE):
        if stale not in written:
            stale.unlink()
    if SUMMARY in contents:
        _replace(out / SUMMARY, contents[SUMMARY])
    return written


def unpack(archive: Path, work: Path) -> list[str]:
    """Take what an earlier run left, all of it or nothing; returns the names.

    Args:
        archive: The first, or the only one; those that go on from it lie beside it.
        work: An empty folder.

    Raises:
        ValueError: It is damaged, or holds anything but plain files with plain names.
        OSError: It cannot be read.
    """
    found: dict[str, bytes] = {}
    for volume in volumes(archive) or [archive]:
        for name, data in _members(volume):
            if name in found:
                raise ValueError(f"{volume} holds {name!r} a second time")
            found[name] = data
            if sum(map(len, found.values())) > _MOST_UNPACKED:
                raise ValueError(f"{volume} holds more than {_MOST_UNPACKED} bytes")
    for name, data in found.items():
        _replace(work / name, data)
    return sorted(found)


def volumes(first: Path) -> list[Path]:
    """The archives that belong together, in order; none if the first is missing."""
    if not first.is_file() or not _VOLUME.fullmatch(first.name):
        return []
    numbered = {}
    for file in first.parent.glob(f"{_STEM}*.tar.gz"):
        if match := _VOLUME.fullmatch(file.name):
            numbered[int(match[1] or 1)] = file
    return [numbered[number] for number in sorted(numbered)]


def _contents(work: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(work.iterdir()):
        plain = _NAME.fullmatch(file.name) and not file.name.startswith(_LEFT_OUT)
        if plain and (data := _read(file)) is not None:
            found[file.name] = data
    return found


def _shared_out(contents: dict[str, bytes], most_bytes: int) -> Iterable[list[str]]:
    """Small files first, so that the first archive holds what is read first."""
    sizes = {
        name: len(data) if name.endswith(".gz") else len(zlib.compress(data, 6))
        for name, data in contents.items()
    }
    names: list[str] = []
    used = 0
    for name in sorted(sizes, key=lambda one: (one.endswith(".gz"), one)):
        needed = sizes[name] + 1024  # with its header
        if names and used + needed > most_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += needed
    yield names


def _archive(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _members(volume: Path) -> list[tuple[str, bytes]]:
    found = []
    try:
        with gzip.open(volume) as stream:  # to its end, where its checksum is
            plain = stream.read(_MOST_UNPACKED + 1)
        if len(plain) > _MOST_UNPACKED:
            raise ValueError(f"{volume} holds more than {_MOST_UNPACKED} bytes")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            for member in tar:
                if not member.isreg() or not _NAME.fullmatch(member.name):
                    raise ValueError(
                        f"{volume} holds {member.name!r}; only plain files with names "
                        "of letters, digits, '.', '_' and '-' are taken"
                    )
                if member.name.startswith(_LEFT_OUT):
                    raise ValueError(
                        f"{volume} holds {member.name!r}, which no run sends"
                    )
                file = tar.extractfile(member)
                found.append((member.name, file.read() if file else b""))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f"{volume} is no whole archive of results: {e}") from e
    return found


def _read(file: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        if file.is_file() and not file.is_symlink():
            return file.read_bytes()
    return None


def _replace(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def main(arguments: Sequence[str]) -> int:
    """0 if all is done; 2, with a line that says why, if not."""
    verb, source, target = arguments
    try:
        if verb == "pack":
            for file in pack(Path(source), Path(target)):
                size = file.stat().st_size
                note = "" if size <= MOST_BYTES else ": LARGER THAN ONE SHOULD BE"
                print(f"{file.name}: {size} bytes{note}")
        else:
            names = unpack(Path(source), Path(target))
            print(f"going on from {source}: {len(names)} files")
    except (OSError, ValueError) as e:
        print(f"gpu.sh: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
