"""Checkpoints: training that can be killed at any moment and resumes.

A checkpoint is one file, `step-N.safetensors`: the arrays and the progress of the
training. It appears completely or not at all, and the previous one is kept until then,
so a crash or a full disk costs at most the steps since.

Checkpoints of another version, by their schema number, cannot be read and are therefore
never replaced or deleted. Schema 1 (two files, `step-N.json` and `step-N.npz`) can
still be read.
"""

import contextlib
import io
import json
import reprlib
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mucudnn.arguments import check_integer, check_path
from mucudnn.errors import CheckpointError
from mucudnn.files import check_file, flush_folder, read_whole, write_whole

_SCHEMA, _FIRST_SCHEMA = 2, 1

_SUFFIX = ".safetensors"

_HEADER = {"schema": int, "step": int, "words": dict, "progress": dict}


class _OtherVersionError(ValueError):
    """A checkpoint has a schema that this version does not know."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Saved state of a training after some step.

    Attributes:
        step: Number of steps taken.
        arrays: Weights, running statistics and optimizer state by name.
        words: Settings that identify the training: model, data, optimizer, seed. Only a
            training with equal settings may resume.
        progress: Position in the data and results so far; plain JSON.
    """

    step: int
    arrays: Mapping[str, Any]
    words: Mapping[str, Any]
    progress: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one training, in a folder of their own.

    Args:
        folder: Folder, created on first use.
        keep: Number of newest checkpoints to keep.

    Raises:
        ValueError: `keep` is less than one.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        if check_integer("keep", keep) < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
        self.folder = check_path("folder", folder)
        self._keep = keep

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have checkpoints, newest first, unverified."""
        return tuple(sorted({*self._steps(_SUFFIX), *self._steps(".json")})[::-1])

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then delete outdated ones.

        Raises:
            CheckpointError: The file cannot be written, or would replace one of another
                version; earlier checkpoints are unharmed.
        """
        path = self._path(checkpoint.step)
        if _of_other_version(path):
            raise CheckpointError(
                f"cannot write the checkpoint of step {checkpoint.step} to "
                f"{self.folder}: the folder has one of another version of mucudnn, "
                "which is not overwritten; name another folder"
            )
        header = {
            "schema": _SCHEMA,
            "step": checkpoint.step,
            "words": dict(checkpoint.words),
            "progress": dict(checkpoint.progress),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_arrays(path, checkpoint.arrays, header)
            # A crash of the system may undo a rename until its folder is flushed.
            flush_folder(self.folder)
        except OSError as e:
            raise CheckpointError(
                f"cannot write the checkpoint of step {checkpoint.step} to "
                f"{self.folder}: {e.strerror or e}; earlier checkpoints are intact"
            ) from e
        self._delete_old(checkpoint.step)

    def load(self, words: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Load the newest valid checkpoint; None where there is none yet.

        A damaged checkpoint is skipped with a warning. One of another version raises an
        error, as resuming from an earlier one would lose it.

        Args:
            words: Settings of the training that wants to resume.

        Raises:
            CheckpointError: Every checkpoint is damaged, or they belong to another
                training or version; the message says what differs.
        """
        complaints = []
        for step in self.steps():
            try:
                checkpoint = self._read(step)
            except _OtherVersionError as e:
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self.folder} is of another "
                    f"version of mucudnn: {e}; continue with that version, or name "
                    "another folder"
                ) from e
            except (OSError, ValueError) as e:
                complaints.append(f"step {step}: {e}")
                continue
            if words is not None:
                check_words(self.folder, checkpoint, words)
            if complaints:
                warnings.warn(
                    f"a checkpoint in {self.folder} is damaged ({complaints[0]}); "
                    f"continuing from step {step}",
                    stacklevel=2,
                )
            return checkpoint
        if complaints:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read: {'; '.join(complaints)}"
            )
        return None

    def _read(self, step: int) -> Checkpoint:
        path = self._path(step)
        if path.exists():
            header = _header(path)
            _check_schema(path, header, _SCHEMA)
            arrays = read_arrays(path, header)
        else:
            path = path.with_suffix(".json")
            header = _json_object(path, read_whole(path))
            _check_schema(path, header, _FIRST_SCHEMA)
            arrays = read_first_arrays(path, header)
        for name, kind in _HEADER.items():
            if name not in header:
                raise ValueError(f"{path.name} lacks {name!r}")
            if type(header[name]) is not kind:
                raise ValueError(
                    f"{name!r} of {path.name} is {reprlib.repr(header[name])}, not of "
                    f"type {kind.__name__}"
                )
        if header["step"] != step:
            raise ValueError(f"{path.name} states that it is of step {header['step']}")
        return Checkpoint(step, arrays, header["words"], header["progress"])

    def _delete_old(self, newest: int) -> None:
        """Delete outdated checkpoints and the partial files of a crash."""
        steps = self._steps(_SUFFIX)
        others = [step for step in steps if _of_other_version(self._path(step))]
        ours = sorted(s for s in steps if s <= newest and s not in others)
        # A file of a later step was damaged, or training would have resumed from it: it
        # goes, too. One of another version stays.
        kept = [*ours[-self._keep :], *others]
        with contextlib.suppress(OSError):
            for step in steps:
                if step not in kept:
                    self._path(step).unlink(missing_ok=True)
            for path in self.folder.glob(".step-*.partial"):
                path.unlink(missing_ok=True)

    def _steps(self, suffix: str) -> list[int]:
        """Return the steps in the names of files with this suffix."""
        if not self.folder.is_dir():
            return []
        numbers = (
            (path, path.stem.removeprefix("step-"))
            for path in self.folder.glob(f"step-*{suffix}")
        )
        return [
            int(number)
            for path, number in numbers
            if number.isdecimal() and path == self._path(int(number), suffix)
        ]

    def _path(self, step: int, suffix: str = _SUFFIX) -> Path:
        return self.folder / f"step-{step:08}{suffix}"


def check_words(folder: Path, found: Checkpoint, words: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a training with other settings."""
    asked = json.loads(json.dumps(dict(words)))
    for name in dict.fromkeys([*asked, *found.words]):
        mine, theirs = asked.get(name), found.words.get(name)
        if mine != theirs:
            was, now = (
                "not stated" if value is None else repr(value)
                for value in (theirs, mine)
            )
            raise CheckpointError(
                f"the checkpoint in {folder} is of another training: its "
                f"{name} is {was}, this one's is {now}; continue with the same "
                "settings or name another folder"
            )


def _header(path: Path) -> dict[str, Any]:
    header = read_header(path)
    if header is None:
        raise ValueError(f"{path.name} holds arrays, but is not a checkpoint")
    return header


def _of_other_version(path: Path) -> bool:
    """Return whether the file is another version's, which must not be touched."""
    try:
        _check_schema(path, _header(path), _SCHEMA)
    except _OtherVersionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _check_schema(path: Path, header: Mapping[str, Any], known: int) -> None:
    """Raise `_OtherVersionError` where a file states an unknown schema."""
    # Without verifying the checksum, which other versions may compute differently.
    schema = header.get("schema", known)
    if type(schema) is int and schema == known:
        return
    newer = isinstance(schema, int | float) and schema > known
    raise _OtherVersionError(
        f"{path.name} has schema {reprlib.repr(schema)}, this version reads {known}"
        + (", a newer one wrote it" if newer else "")
    )


# Every reader of the format can read the arrays. The file's metadata has one additional
# text, `mucudnn`: a JSON object of the writer's header, with the checksum of every
# tensor (type and shape included) and one of the object itself. The first version wrote
# two files, `NAME.npz` and `NAME.json`, which can still be read.


_KEY = "mucudnn"

T = TypeVar("T")


def write_arrays(
    path: Path, arrays: Mapping[str, Any], header: Mapping[str, Any]
) -> None:
    """Write a file completely, or leave it as it was.

    Data types are preserved, bfloat16 and float16 included. `header` is plain JSON.
    """
    dense = {}  # contiguous, in native byte order
    for name, value in arrays.items():
        array = np.asarray(value)
        dense[name] = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    # The file format has no checksums, and a damaged weight would train on.
    checksums = {name: _checksum(array) for name, array in dense.items()}
    body = {**header, "tensors": checksums}
    text = json.dumps({"crc32": seal(body), **body})
    try:
        raw = save(dense, metadata={_KEY: text})
    except SafetensorError as e:
        raise ValueError(f"arrays that a safetensors file cannot hold: {e}") from e
    write_whole(path, raw)


def read_header(path: Path) -> dict[str, Any] | None:
    """Return a file's header, unverified; None if the file has none of ours."""
    metadata = _read_with(path, lambda file: file.metadata())
    if metadata is None or _KEY not in metadata:
        return None
    return _json_object(path, metadata[_KEY])


def read_arrays(path: Path, header: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arrays of a file, verified by its header's checksums if any."""
    arrays = _read_with(
        path, lambda file: {n: file.get_tensor(n) for n in [*file.keys()]}
    )
    if header is None:
        return arrays
    stated = _sealed(path, header).get("tensors")
    if not isinstance(stated, dict) or stated.keys() != arrays.keys():
        raise ValueError(f"{path.name} does not state the checksums of its tensors")
    for name, array in arrays.items():
        if stated[name] != _checksum(array):
            raise ValueError(f"{name!r} of {path.name} does not match its checksum")
    return arrays


def read_first_arrays(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verified arrays of the `step-N.npz` beside a `step-N.json`."""
    body = _sealed(path, header)
    data = path.with_suffix(".npz")
    raw = read_whole(data)
    if not isinstance(body.get("data"), dict) or (
        body["data"].get("crc32") != zlib.crc32(raw)
    ):
        raise ValueError(f"{data.name} does not match its checksum")
    try:
        with np.load(io.BytesIO(raw)) as archive:
            return dict(archive)
    except Exception as e:  # readers of archives raise anything
        raise ValueError(f"{data.name} is not an archive of arrays: {e}") from e


def _sealed(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header without its checksum, which is verified."""
    body = {name: value for name, value in header.items() if name != "crc32"}
    if header.get("crc32") != seal(body):
        raise ValueError(f"{path.name} does not match the checksum it states")
    return body


def seal(body: Mapping[str, Any]) -> int:
    """Return the checksum of a JSON object, independent of its formatting."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _json_object(path: Path, text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; `ValueError` for anything else."""
    try:
        found = json.loads(text)
    except RecursionError as e:
        raise ValueError(f"{path.name} is nested too deeply") from e
    except ValueError as e:
        raise ValueError(f"{path.name} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no JSON object")  # noqa: TRY004 (a file)
    return found


def _checksum(array: Any) -> int:
    kind = zlib.crc32(f"{array.dtype.name} {array.shape}".encode())
    return zlib.crc32(array.reshape(-1).view(np.uint8), kind)


def _read_with(path: Path, read: Callable[[Any], T]) -> T:
    check_file(path)
    try:
        with safe_open(path, "numpy") as file:
            return read(file)
    except (SafetensorError, AttributeError, TypeError, ValueError) as e:
        raise ValueError(f"{path.name} cannot be read as arrays: {e}") from e
