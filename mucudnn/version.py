"""Version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of mucudnn; `unknown` if it runs from a folder."""
    try:
        return version("mucudnn")
    except PackageNotFoundError:
        return "unknown"
