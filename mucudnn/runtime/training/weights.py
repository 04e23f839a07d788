"""The weights of a network in a file: out of a trainer, and into one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mucudnn.arguments import a_path
from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.tensor_file import read_arrays, read_header, write_arrays

__all__ = ["load_weights", "save_weights"]


def save_weights(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to a safetensors file.

    Raises:
        CheckpointError: It cannot be written.
    """
    path = a_path("path", path)
    try:
        write_arrays(path, arrays, {})
    except OSError as e:
        raise CheckpointError(
            f"cannot write weights to {path}: {e.strerror or e}"
        ) from e


def load_weights(path: Path | str, state: StateStore, names: Sequence[str]) -> None:
    """Overwrite tensors of a state by those of a safetensors file.

    Raises:
        CheckpointError: It cannot be read or is damaged, or holds other tensors than
            those named; then nothing is changed.
    """
    path = a_path("path", path)
    try:
        state.load(read_arrays(path, read_header(path)), names)
    except OSError as e:
        raise CheckpointError(
            f"cannot read weights from {path}: {e.strerror or e}"
        ) from e
    except ValueError as e:
        raise CheckpointError(f"cannot load weights from {path}: {e}") from e
