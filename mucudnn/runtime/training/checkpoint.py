"""Training that can be killed at any moment and goes on from its last checkpoint.

A checkpoint is two files, `step-N.npz` with the arrays and `step-N.json` with the rest
and the first one's size and checksum. Each appears whole, the JSON last: what has a
JSON file is complete. The one before is kept until the next is complete, so a crash or
a full disk costs at most the steps since then.

What another version wrote, by its schema number, is not understood, and so it is never
replaced or deleted.
"""

import contextlib
import json
import os
import reprlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mucudnn.arguments import a_path, an_integer
from mucudnn.errors import CheckpointError
from mucudnn.files import flush_folder, read_whole, write_whole
from mucudnn.runtime.training.npz import pack_arrays, unpack_arrays

__all__ = ["Checkpoint", "Checkpoints"]

_SCHEMA = 1
_UNFINISHED = ".partial"
_JSON = {
    "schema": int,
    "step": int,
    "data": dict,
    "words": dict,
    "progress": dict,
}
_DATA = {"nbytes": int, "crc32": int}


class _OtherVersionError(ValueError):
    """A checkpoint has a schema that this version does not know."""


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
        if an_integer("keep", keep) < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
        self.folder = a_path("folder", folder)
        self._keep = keep

    def steps(self) -> tuple[int, ...]:
        """The steps there are checkpoints of, newest first; not yet verified."""
        found = []
        if self.folder.is_dir():
            for path in self.folder.glob("step-*.json"):
                number = path.stem.removeprefix("step-")
                if number.isdecimal() and path == self._paths(int(number))[1]:
                    found.append(int(number))
        return tuple(sorted(found, reverse=True))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; then forget those that are too old.

        Raises:
            CheckpointError: It cannot be written, or another version's is in its
                place; those before it are unharmed.
        """
        data, text = self._paths(checkpoint.step)
        if self._of_other_version(checkpoint.step):
            raise CheckpointError(
                f"cannot write the checkpoint of step {checkpoint.step} to "
                f"{self.folder}: there is one of another version of mucudnn, which "
                "stays; name another folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            nbytes, crc = _write(data, lambda f: pack_arrays(f, checkpoint.arrays))
            body = {
                "schema": _SCHEMA,
                "step": checkpoint.step,
                "data": {"file": data.name, "nbytes": nbytes, "crc32": crc},
                "words": dict(checkpoint.words),
                "progress": dict(checkpoint.progress),
            }
            sealed = json.dumps({"crc32": _seal(body), **body}, indent=1)
            write_whole(text, sealed.encode())
            flush_folder(self.folder)
        except OSError as e:
            raise CheckpointError(
                f"cannot write the checkpoint of step {checkpoint.step} to "
                f"{self.folder}: {e.strerror or e}; those before it are unharmed"
            ) from e
        self._forget_old(checkpoint.step)

    def load(self, words: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """The newest valid checkpoint, or None where there is none yet.

        One that is damaged is passed over with a warning. One of another version is
        not: to go on from before it would be to lose it.

        Args:
            words: Of the training that wants to go on.

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
                    f"version of mucudnn: {e}; go on with that version, or name "
                    "another folder"
                ) from e
            except (OSError, ValueError) as e:
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
        body = _object(text)
        _check_schema(text, body)
        if body.pop("crc32", None) != _seal(body):
            raise ValueError(f"{text.name} does not have the checksum it states")
        _check_members(text.name, body, _JSON)
        _check_members(f"data of {text.name}", body["data"], _DATA)
        if body["step"] != step:
            raise ValueError(f"{text.name} says it is of step {body['step']}")
        stated = body["data"]
        raw = read_whole(data)
        if len(raw) != stated["nbytes"]:
            raise ValueError(
                f"{data.name} has {len(raw)} bytes, not {stated['nbytes']}"
            )
        if zlib.crc32(raw) != stated["crc32"]:
            raise ValueError(f"{data.name} does not have the checksum it had")
        try:
            arrays = unpack_arrays(raw)
        except ValueError as e:
            raise ValueError(f"{data.name}: {e}") from e
        return Checkpoint(step, arrays, body["words"], body["progress"])

    def _of_other_version(self, step: int) -> bool:
        """Whether there is one that this version must not touch."""
        _, text = self._paths(step)
        try:
            _check_schema(text, _object(text))
        except _OtherVersionError:
            return True
        except (OSError, ValueError):
            pass
        return False

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

        What is of a later step was damaged, or training would not have gone on from
        before it; or it is of another version.
        """
        steps = self.steps()
        others = [step for step in steps if self._of_other_version(step)]
        ours = [step for step in steps if step <= newest and step not in others]
        kept = [*ours[: self._keep], *others]
        with contextlib.suppress(OSError):
            for step in steps:
                if step not in kept:
                    data, text = self._paths(step)
                    text.unlink(missing_ok=True)  # first: data alone is no checkpoint
                    data.unlink(missing_ok=True)
            if not others:  # whose data may have any name
                for path in self._leftovers():
                    path.unlink(missing_ok=True)

    def _leftovers(self) -> Iterator[Path]:
        complete = {self._paths(step)[0] for step in self.steps()}
        for dot in ("", "."):
            yield from self.folder.glob(f"{dot}step-*{_UNFINISHED}")
        for path in self.folder.glob("step-*.npz"):
            if path not in complete:
                yield path

    def _paths(self, step: int) -> tuple[Path, Path]:
        stem = f"step-{step:08}"
        return self.folder / f"{stem}.npz", self.folder / f"{stem}.json"


def _object(text: Path) -> dict[str, Any]:
    """What a JSON file says."""
    try:
        body = json.loads(read_whole(text))
    except RecursionError as e:
        raise ValueError(f"{text.name} is nested too deeply") from e
    except ValueError as e:
        raise ValueError(f"{text.name} is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise ValueError(f"{text.name} holds no JSON object")  # noqa: TRY004 (a file)
    return body


def _check_schema(text: Path, body: Mapping[str, Any]) -> None:
    """Raise an `_OtherVersionError` where a file states a schema that is not ours.

    Whatever its checksum: another version may make it in another way.
    """
    schema = body.get("schema", _SCHEMA)
    if type(schema) is int and schema == _SCHEMA:
        return
    newer = isinstance(schema, int | float) and schema > _SCHEMA
    raise _OtherVersionError(
        f"{text.name} has schema {reprlib.repr(schema)}, this version reads {_SCHEMA}"
        + (", a newer one wrote it" if newer else "")
    )


def _check_members(
    where: str, body: Mapping[str, Any], kinds: Mapping[str, type]
) -> None:
    for name, kind in kinds.items():
        if name not in body:
            raise ValueError(f"{where} lacks {name!r}")
        if type(body[name]) is not kind:
            raise ValueError(
                f"{name!r} of {where} is {reprlib.repr(body[name])}, not of type "
                f"{kind.__name__}"
            )


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> tuple[int, int]:
    """Fill a file; returns its size and checksum."""
    size, crc = 0, 0

    def filled(file: BinaryIO) -> None:
        nonlocal size, crc
        fill(file)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)

    write_whole(path, filled)
    return size, crc


def _seal(body: Mapping[str, Any]) -> int:
    """Checksum of what a JSON file says, however it is laid out."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _word(value: Any) -> str:
    return "not stated" if value is None else repr(value)
