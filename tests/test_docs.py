"""What the documents name exists: tests, flags, files and headings."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from server.engine_client import EngineClient
from server.flags import make_parser
from server.metrics import Metrics
from server.router_config import PrefillAddress, RouterConfig
from server.router_metrics import RouterMetrics
from server.router_workers import Dispatcher
from tests.server_process import ROOT

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of programs that stand beside ours in commands: torchrun, hf and the servers we compare with.
FLAGS_OF_OTHERS = {
    *("--nproc-per-node", "--master-addr", "--standalone", "--local-dir"),
    *("--cb-max-memory-percent", "--continuous-batching", "--enforce-eager", "--no-enable-prefix-caching"),
}
FILES_OF_MODELS = {"config.json", "generation_config.json"}

every_document = pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)


@pytest.mark.parametrize(("name", "at_least"), [("disaggregation", 90), ("parallelism", 70)])
def test_guarantees_name_tests_that_exist(name: str, at_least: int) -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", (ROOT / f"docs/{name}_guarantees.md").read_text())
    assert len(found) > at_least
    tests: dict[str, set[str]] = {}
    path = ""
    for given, test in found:
        path = given or path
        tests.setdefault(path, set()).add(test)
    for path, named in tests.items():
        assert named - set(re.findall(r"\bdef (test_\w+)\(", (ROOT / path).read_text())) == set(), path


@every_document
def test_flags_exist(path: Path) -> None:
    known = set(make_parser()._option_string_actions) | FLAGS_OF_OTHERS
    for program in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z0-9-]+)"', program.read_text()))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text())) - known == set()


@functools.cache
def known_files() -> set[str]:
    """Paths from the root, and names alone: tables name files of one folder so."""
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in folder.rglob("*.*"))]
    return {name for file in files for name in (str(file.relative_to(ROOT)), file.name)}


@every_document
def test_files_exist(path: Path) -> None:
    named = set(re.findall(r"`([\w/.-]+\.(?:py|md|c|toml|txt|json))`", path.read_text()))
    assert named - known_files() - FILES_OF_MODELS == set()


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_metric_is_described() -> None:
    client = EngineClient(1)
    try:
        rendered = [Metrics(client, mode).render() for mode in ("null", "prefill", "decode")]
    finally:
        client.close()
    servers = RouterConfig(prefill=(PrefillAddress("http://prefill"),), decode=("http://decode",))
    rendered.append(RouterMetrics(Dispatcher(servers)).render())
    there = set(re.findall(r"^# TYPE (\w+) ", b"".join(rendered).decode(), re.MULTILINE))
    assert len(there) > 35
    rows = re.findall(r"^\| `(lockstep_\w+)` \| (?!\S*`)", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert there == set(rows)


def test_defaults_of_timeouts_are_those_of_the_flags() -> None:
    parser = make_parser()
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([\d.]+) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    assert {flag: float(seconds) for flag, seconds in rows} == {
        flag: parser.get_default(flag.removeprefix("--").replace("-", "_")) for flag, _ in rows
    }
    others = {flag for flag in parser._option_string_actions if flag.endswith("-timeout")} - {flag for flag, _ in rows}
    assert others == set()
