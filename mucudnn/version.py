"""The version that is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


def installed_version() -> str:
    """Of mucudnn itself; `unknown` where it runs from a folder."""
    try:
        return version("mucudnn")
    except PackageNotFoundError:
        return "unknown"
