"""Entry points of installed distributions, loaded on demand, and our own version.

A distribution that cannot be read causes a warning that names it, but does not fail the
command that searches for another one.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distributions,
    version,
)
from pathlib import Path
from typing import Any


class PluginWarning(UserWarning):
    """A warning about an installed distribution with unusable entry points."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A named object offered by an installed distribution."""

    name: str
    distribution: str
    entry: EntryPoint

    def load(self) -> Any:
        """Import the object.

        Raises:
            ImportError: The import fails; the message names the distribution.
        """
        try:
            return self.entry.load()
        except (Exception, SystemExit) as e:  # foreign modules may raise anything
            raise ImportError(
                f"{self.name!r} of the distribution {self.distribution} "
                f"({self.entry.value}) cannot be loaded: {type(e).__name__}: {e}"
            ) from e


def plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entry points of a group, in the order of `sys.path`."""
    found: dict[tuple[str, str], Plugin] = {}
    for distribution in distributions():
        try:
            entries = distribution.entry_points.select(group=group)
        except Exception as e:  # parsers of damaged metadata may raise anything
            warnings.warn(
                f"the entry points of the distribution {_name(distribution)} cannot be "
                f"read: {type(e).__name__}: {e}",
                PluginWarning,
                stacklevel=2,
            )
            continue
        for entry in entries:
            plugin = Plugin(entry.name, _name(distribution), entry)
            # A distribution that is found twice on `sys.path` counts where it is
            # imported.
            found.setdefault((plugin.distribution, plugin.name), plugin)
    return tuple(found.values())


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names in a group, each once."""
    return tuple(dict.fromkeys(plugin.name for plugin in plugins(group)))


def find_plugin(group: str, name: str) -> Plugin | None:
    """Return the plugin of a name in a group, or None.

    Raises:
        ValueError: Two distributions offer that name.
    """
    found = [plugin for plugin in plugins(group) if plugin.name == name]
    if len(found) > 1:
        both = " and ".join(plugin.distribution for plugin in found)
        raise ValueError(
            f"{name!r} in the group {group} is offered by the distributions {both}; "
            "remove all but one"
        )
    return found[0] if found else None


def module_files(*groups: str) -> Iterator[str]:
    """Yield source files of modules imported for entry points of some groups."""
    for group in groups:
        for plugin in plugins(group):
            # Look among imported modules only: importing others would run foreign code.
            module = sys.modules.get(plugin.entry.module)
            if module is not None and module.__file__ is not None:
                yield module.__file__


def _name(distribution: Distribution) -> str:
    """Return a distribution's name, or its folder's name without metadata."""
    with suppress(Exception):
        if name := distribution.name:
            return name
    folder = Path(str(getattr(distribution, "_path", "without a name")))
    return folder.stem.partition("-")[0]


def installed_version() -> str:
    """Return the version of mucudnn; `unknown` if it runs from a folder."""
    try:
        return version("mucudnn")
    except PackageNotFoundError:
        return "unknown"
