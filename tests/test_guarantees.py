"""What the documents promise names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.server_process import ROOT


def _defined(path: Path) -> dict[str, bool]:
    """Functions of a file -> whether they are tests that run only in sweeps."""
    return {
        node.name: any(ast.unparse(decorator) == "pytest.mark.sweep" for decorator in node.decorator_list)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def test_guarantees_of_parallelism_name_tests_that_exist() -> None:
    """An asterisk marks those of sweeps."""
    text = (ROOT / "docs/parallelism_guarantees.md").read_text()
    found = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`(\*?)", text)
    assert len(found) > 70
    path = ""
    for given, name, asterisk in found:
        path = given or path
        tests = _defined(ROOT / path)
        assert name in tests, f"{path}::{name}"
        assert tests[name] == bool(asterisk), f"{path}::{name}"
