"""The arrows between folders point one way: what each may import, checked on the imports in its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "scheduler", "disagg", "models", "layers")

# Modules (with all below them) that a folder may import besides its own.
ALLOWED: dict[str, tuple[str, ...]] = {
    "launch": ("server",),
    # The API process never loads the engine: it shares settings and messages with it, nothing else.
    "server": ("scheduler.config", "scheduler.messages", "disagg.bootstrap"),
    "scheduler": ("disagg", "models", "layers"),
    "disagg": ("layers",),
    "models": ("layers",),
    "layers": (),
}


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too; `from a import b` gives `a.b`.

    package: the importing file's package, which relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            for name in node.names:
                yield node.lineno, f"{source}.{name.name}"


def violations(folder: str, text: str, package: str, where: str) -> list[str]:
    """One line for each import in `text` that `folder` may not have."""
    allowed = (folder, *ALLOWED[folder])
    return [
        f"{where}:{line} imports {module}"
        for line, module in imported_modules(ast.parse(text), package)
        if module.split(".")[0] in (*FOLDERS, "launch", "tests", "benchmarks")
        and not any(module == name or module.startswith(f"{name}.") for name in allowed)
    ]


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_only_what_lies_below_it(folder: str) -> None:
    files = [ROOT / "launch.py"] if folder == "launch" else sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = []
    for path in files:
        relative = path.relative_to(ROOT)
        package = ".".join(relative.parent.parts)
        found += violations(folder, path.read_text(encoding="utf-8"), package, str(relative))
    assert found == []


@pytest.mark.parametrize(
    ("folder", "text", "wrong"),
    [
        ("layers", "import models", "models"),
        ("models", "def load():\n    from scheduler import engine", "scheduler.engine"),
        ("server", "from scheduler.engine import Engine", "scheduler.engine.Engine"),
        ("server", "from scheduler import engine", "scheduler.engine"),
        ("server", "import layers.attention.base as base", "layers.attention.base"),
        ("disagg", "import scheduler.messages", "scheduler.messages"),
        ("scheduler", "from tests.server_process import ServerProcess", "tests.server_process.ServerProcess"),
    ],
)
def test_wrong_import_is_noticed(folder: str, text: str, wrong: str) -> None:
    (line,) = violations(folder, text, f"{folder}.part", "x.py")
    assert line.endswith(f" imports {wrong}")


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("server", "from scheduler.messages import encode\nimport scheduler.config\nimport server.app"),
        ("models", "from layers.linear import Linear\nimport torch\nfrom . import base"),
        ("scheduler", "import models, layers.sampling\nfrom disagg.manager import KVManager"),
    ],
)
def test_right_import_is_accepted(folder: str, text: str) -> None:
    assert violations(folder, text, folder, "x.py") == []
