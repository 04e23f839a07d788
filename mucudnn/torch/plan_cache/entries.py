"""A folder of remembered values, one file each.

Remembering never stops work. An entry that cannot be read, or is not what was written,
counts as none, with one warning, and is written anew; where nothing can be written, as
on a full disk, nothing is remembered. Files appear whole, so processes may share the
folder: of two that write the same entry the later wins, and both are right. What was
not asked for the longest goes when the folder has grown beyond its size.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mucudnn.codecs.values import decode, load_json, members_of
from mucudnn.files import read_whole, write_whole
from mucudnn.runtime.database.sqlite_file import warn
from mucudnn.torch.plan_cache.structure import digest_of

__all__ = ["Entries"]

_SCHEMA = 2
_MEMBERS = ("schema", "key", "sha256", "value")
_LARGEST = 16 << 20
_MOST = 64 << 20
_NAME = re.compile(r"[0-9a-f]{64}\.json")


class Entries:
    """Values by key.

    Args:
        folder: Where; made when it is first written to.
        most: Bytes that it may have.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self._folder = folder
        self._most = most
        self._refused: set[str] = set()
        self._unwritable = False

    def get(self, key: str) -> Any | None:
        """The value of a key, which is a hash; None if there is none."""
        path = self._path(key)
        try:
            text = read_whole(path, most=_LARGEST).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else None
            self.refused(key, why or str(e))
            return None
        try:
            value = _checked(key, text)
        except ValueError as e:
            self.refused(key, str(e))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return value

    def put(self, key: str, value: Any) -> None:
        """Remember a value."""
        members = (_SCHEMA, key, digest_of(value), value)
        whole = dict(zip(_MEMBERS, members, strict=True))
        data = json.dumps(whole, separators=(",", ":")).encode()
        if len(data) > _LARGEST or self._unwritable:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), data)
        except OSError as e:
            if key not in self._refused:  # else it was said
                self._unwritable = True
                warn(
                    f"plans are not remembered, {self._folder} cannot be written: "
                    f"{e.strerror or e}"
                )
            return
        self._shrink()

    def refused(self, key: str, why: str) -> None:
        """Warn that an entry is not used."""
        self._refused.add(key)
        warn(f"passing over {self._path(key)}, which will be made anew: {why}")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _shrink(self) -> None:
        """Delete what was not asked for the longest; others may do so, too."""
        found = sorted(self._files())
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self._most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When it was asked for, bytes, and path of every entry."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as rows:
            for row in rows:
                if _NAME.fullmatch(row.name):
                    with contextlib.suppress(OSError):
                        status = row.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, Path(row.path)


def _checked(key: str, text: str) -> Any:
    schema, whose, sha256, value = members_of("entry", load_json(text), _MEMBERS)
    if decode("schema", int, schema) != _SCHEMA:
        raise ValueError(f"schema is {schema}, this version reads {_SCHEMA}")
    if whose != key:
        raise ValueError("it is the entry of something else")
    if digest_of(value) != sha256:
        raise ValueError("its contents are not what was written")
    return value
