"""PyTorch that is missing, too old or not tested is said in a sentence."""

import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import mucudnn.torch
from mucudnn.errors import BackendUnavailableError
from mucudnn.torch import versions


@pytest.mark.parametrize("version", ["1.13.1", "2.9.0", "2.10.0+cpu", "2.10.0a0+git1"])
def test_an_old_version_is_refused_with_one_that_works(version):
    words = f"2.11 or newer and found {re.escape(version)}; it is tested with 2.11"
    with pytest.raises(BackendUnavailableError, match=words):
        versions.check_version(version)
    with pytest.raises(ImportError, match=words):
        versions.check_version(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.100.1+cpu", "3.0.0rc1"])
def test_a_version_that_is_not_tested_is_warned_of(version):
    with pytest.warns(UserWarning, match=f"not with {re.escape(version)}") as caught:
        versions.check_version(version)
    assert len(caught) == 1


@pytest.mark.parametrize("version", versions.TESTED)
def test_tested_versions_are_fine(version):
    versions.check_version(f"{version}.1+cpu")
    assert versions.TESTED[version].endswith(".")


def test_none_is_said_when_it_is_needed(monkeypatch):
    monkeypatch.setattr(mucudnn.torch, "_VERSION", None)
    monkeypatch.setattr(mucudnn.torch, "installed_version", lambda: None)
    monkeypatch.delitem(vars(mucudnn.torch), "backend", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"install '\.\[torch\]'"):
        _ = mucudnn.torch.backend


def test_importing_the_package_with_an_old_version(monkeypatch):
    real = metadata.version
    monkeypatch.delitem(versions.sys.modules, "torch", raising=False)
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.4.0" if name == "torch" else real(name)
    )
    assert versions.installed_version() == "2.4.0"
    spec = importlib.util.find_spec("mucudnn.torch")
    with pytest.raises(BackendUnavailableError, match=r"found 2\.4\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_extra_asks_for_a_tested_version():
    project = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    [asked] = extras["torch"]
    assert asked.removeprefix("torch>=") in versions.TESTED
