"""A transfer backend whose package is not installed is refused before anything is started."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import launch
from disagg import mooncake_engine, nixl_agent
from scheduler.config import EngineConfig
from server import transfer_package
from server.config import StartupError

MODULES = {"mooncake": ("mooncake",), "nixl": ("nixl_cu12", "nixl_cu13")}
OWN_LINES = {
    "mooncake": lambda: mooncake_engine.load_library("cpu", ""),
    "nixl": nixl_agent.load_library,
}


def engine(backend: str) -> EngineConfig:
    return EngineConfig(model_path="m", disaggregation_mode="prefill", disaggregation_transfer_backend=backend)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no package of a backend were there: it is neither found nor imported."""
    names = [name for modules in MODULES.values() for name in modules]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))
    for name in (*names, "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("backend", MODULES)
def test_the_line_is_the_one_of_the_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError) as refused:
        transfer_package.check(engine(backend))
    monkeypatch.setenv("MC_FORCE_TCP", "1")  # which the backend sets for the process
    with pytest.raises(ValueError, match="pip install") as own:
        OWN_LINES[backend]()
    assert str(refused.value) == str(own.value)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("mode", [(), ("--disaggregation-mode=prefill",), ("--disaggregation-mode=decode",)])
@pytest.mark.parametrize("backend", MODULES)
def test_every_mode_refuses(
    mode: tuple[str, ...], backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of the process that runs the tests
    words = [*mode, f"--disaggregation-transfer-backend={backend}", "--port=0", "--model-path=tiny-llama"]
    assert launch.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"launch.py: error: --disaggregation-transfer-backend {backend} needs ")
    assert f"pip install 'lockstep[{backend}]'" in line


@pytest.mark.parametrize("backend", ["fake", "tcp"])
def test_built_in_backends_need_nothing(backend: str) -> None:
    transfer_package.check(engine(backend))


def test_a_package_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    with pytest.raises(StartupError, match="needs a package that is not installed"):
        transfer_package.check(engine("mooncake"))  # another package of this name
    (tmp_path / "mooncake" / "engine.py").write_text("raise AssertionError('imported')")
    importlib.invalidate_caches()
    transfer_package.check(engine("mooncake"))
