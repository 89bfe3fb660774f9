"""What the documents promise names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.server_process import ROOT


def test_guarantees_of_parallelism_name_tests_that_exist() -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", (ROOT / "docs/parallelism_guarantees.md").read_text())
    assert len(found) > 70
    path = ""
    for given, name in found:
        path = given or path
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
