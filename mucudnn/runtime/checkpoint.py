"""Training that can be killed at any moment and goes on from its last checkpoint.

A checkpoint is two files, `step-N.npz` with the arrays and `step-N.json` with the rest
and the first one's size and checksum. Each is written under another name, flushed to
the disk and renamed, the JSON last: what has a JSON file is complete. The one before
is kept until the next is complete, so a crash or a full disk costs at most the steps
since then.
"""

import contextlib
import io
import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mucudnn.errors import CheckpointError

__all__ = ["Checkpoint", "Checkpoints"]

_SCHEMA = 1
_UNFINISHED = ".partial"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What training goes on from.

    Attributes:
        step: Steps that were taken.
        arrays: Weights, running statistics and optimizer state by name.
        words: What says that a checkpoint belongs to a training: model, data,
            optimizer, seed. Two trainings with equal words can share it.
        progress: Where it stands, and what has been found so far; plain JSON.
    """

    step: int
    arrays: Mapping[str, Any]
    words: Mapping[str, Any]
    progress: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one training, in a folder of their own.

    Args:
        folder: Made on first use.
        keep: How many of the newest stay.

    Raises:
        ValueError: `keep` is less than one.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
        self.folder = Path(folder)
        self._keep = keep

    def steps(self) -> tuple[int, ...]:
        """The steps there are checkpoints of, newest first; not yet verified."""
        found = []
        if self.folder.is_dir():
            for path in self.folder.glob("step-*.json"):
                number = path.stem.removeprefix("step-")
                if number.isdecimal():
                    found.append(int(number))
        return tuple(sorted(found, reverse=True))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; then forget those that are too old.

        Raises:
            CheckpointError: It cannot be written; those before it are unharmed.
        """
        data, text = self._paths(checkpoint.step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            nbytes, crc = _write(data, lambda file: _pack(file, checkpoint.arrays))
            body = {
                "schema": _SCHEMA,
                "step": checkpoint.step,
                "data": {"file": data.name, "nbytes": nbytes, "crc32": crc},
                "words": dict(checkpoint.words),
                "progress": dict(checkpoint.progress),
            }
            sealed = json.dumps({"crc32": _seal(body), **body}, indent=1)
            _write(text, lambda file: file.write(sealed.encode()))
            _flush_folder(self.folder)
        except OSError as e:
            raise CheckpointError(
                f"cannot write the checkpoint of step {checkpoint.step} to "
                f"{self.folder}: {e.strerror or e}; those before it are unharmed"
            ) from e
        self._forget_old(checkpoint.step)

    def load(self, words: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """The newest valid checkpoint, or None where there is none yet.

        One that is damaged is passed over with a warning.

        Args:
            words: Of the training that wants to go on.

        Raises:
            CheckpointError: Every checkpoint is damaged, or they belong to another
                training; the message says what differs.
        """
        complaints = []
        for step in self.steps():
            try:
                checkpoint = self._read(step)
            except (OSError, ValueError, KeyError, TypeError) as e:
                complaints.append(f"step {step}: {e}")
                continue
            if words is not None:
                self._check_words(checkpoint, words)
            if complaints:
                warnings.warn(
                    f"a checkpoint in {self.folder} is damaged ({complaints[0]}); "
                    f"going on from step {step}",
                    stacklevel=2,
                )
            return checkpoint
        if complaints:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read: {'; '.join(complaints)}"
            )
        return None

    def _read(self, step: int) -> Checkpoint:
        data, text = self._paths(step)
        body = json.loads(text.read_bytes())
        if not isinstance(body, dict) or body.pop("crc32", None) != _seal(body):
            raise ValueError(f"{text.name} does not have the checksum it states")
        if body["schema"] != _SCHEMA:
            raise ValueError(f"{text.name} has schema {body['schema']}, not {_SCHEMA}")
        raw = data.read_bytes()
        stated = body["data"]
        if len(raw) != stated["nbytes"]:
            raise ValueError(
                f"{data.name} has {len(raw)} bytes, not {stated['nbytes']}"
            )
        if zlib.crc32(raw) != stated["crc32"]:
            raise ValueError(f"{data.name} does not have the checksum it had")
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            return Checkpoint(
                step=body["step"],
                arrays={name: arrays[name] for name in arrays.files},
                words=body["words"],
                progress=body["progress"],
            )

    def _check_words(self, found: Checkpoint, words: Mapping[str, Any]) -> None:
        asked = json.loads(json.dumps(dict(words)))
        for name in dict.fromkeys([*asked, *found.words]):
            mine, theirs = asked.get(name), found.words.get(name)
            if mine != theirs:
                raise CheckpointError(
                    f"the checkpoint in {self.folder} is of another training: its "
                    f"{name} is {_word(theirs)}, this one's is {_word(mine)}; go on "
                    "with the same settings or name another folder"
                )

    def _forget_old(self, newest: int) -> None:
        """Drop what is older than those kept, and what a crash left unfinished.

        What is newer was damaged, or training would not have gone on from before it.
        """
        steps = self.steps()
        kept = [step for step in steps if step <= newest][: self._keep]
        with contextlib.suppress(OSError):
            for step in steps:
                if step not in kept:
                    data, text = self._paths(step)
                    text.unlink(missing_ok=True)  # first: data alone is no checkpoint
                    data.unlink(missing_ok=True)
            for path in self._leftovers():
                path.unlink(missing_ok=True)

    def _leftovers(self) -> Iterator[Path]:
        complete = {self._paths(step)[0] for step in self.steps()}
        yield from self.folder.glob(f"step-*{_UNFINISHED}")
        for path in self.folder.glob("step-*.npz"):
            if path not in complete:
                yield path

    def _paths(self, step: int) -> tuple[Path, Path]:
        stem = f"step-{step:08}"
        return self.folder / f"{stem}.npz", self.folder / f"{stem}.json"


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> tuple[int, int]:
    """Fill a file and give it its name once it is on the disk: (size, checksum)."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with unfinished.open("w+b") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            size, crc = file.seek(0, os.SEEK_END), 0
            file.seek(0)
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return size, crc


def _pack(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """What `numpy.savez` writes, whatever the arrays are called."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _flush_folder(folder: Path) -> None:
    """The names, too, must survive a power cut; not every system has that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _seal(body: Mapping[str, Any]) -> int:
    """Checksum of what a JSON file says, however it is laid out."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _word(value: Any) -> str:
    return "not stated" if value is None else repr(value)
