"""Fixtures for every folder of tests."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from disagg.mooncake_engine import load_library
from server import default_model
from tests.server_process import ServerProcess, held_port, wait_until

if not torch.cuda.is_available():
    # The Triton kernels then run in Triton's interpreter, which wants to know before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples every time, and no judgement on how fast this machine is.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` exist only where there is one, those marked `sweep` only where `-m` speaks of them."""
    unwanted = [] if torch.cuda.is_available() else ["gpu"]
    if "sweep" not in config.option.markexpr:
        unwanted.append("sweep")
    kept, left_out = [], []
    for item in items:
        (left_out if any(item.get_closest_marker(name) for name in unwanted) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The mooncake backend needs a system library that no package brings. `.ci/run` sees to it."""
    if "mooncake" in item.nodeid and (reason := _mooncake_problem()):
        pytest.skip(reason)


@functools.cache
def _mooncake_problem() -> str:
    try:
        load_library("cpu", "")
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct as the server makes it; the first use on a machine downloads it."""
    return default_model.ensure(quiet=True)


@pytest.fixture(scope="session")
def one_process() -> Iterator[str]:
    """URL of a server of one process with tiny-qwen3-moe in float32 and room for 4096 tokens, to compare others with.

    Tests leave it as it is.
    """
    flags = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
    server = ServerProcess(*flags, "--max-total-tokens", "4096")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a C compiler, if there is one here, that optimises nothing: code need not be fast in every test."""
    folder = tmp_path_factory.mktemp("bin")
    compiler = next((path for name in ("gcc", "cc") if (path := shutil.which(name))), None)
    if compiler is not None:
        (folder / "gcc").write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        (folder / "gcc").chmod(0o755)
    return folder


@pytest.fixture
def free_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 at which nobody listens; prefer port 0 wherever the tested thing takes it."""
    with held_port() as held:
        yield int(held.getsockname()[1])


@pytest.fixture
def launch_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with the given flags; ends them after the test and checks that nothing is left of them."""
    before = set(psutil.Process().children(recursive=True))
    servers: list[ServerProcess] = []

    def launch(*args: str, **options: dict[str, str]) -> ServerProcess:
        servers.append(ServerProcess(*args, **options))
        return servers[-1]

    yield launch
    for server in servers:
        server.stop()
    me = psutil.Process()
    wait_until(lambda: set(me.children(recursive=True)) <= before, 60, "all processes of the servers have ended")
