"""Packages that only some settings need."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any


def load_library(module: str, flag: str, package: str, names: Sequence[str]) -> Any:
    """The module of a package, in words, that `flag` needs, with these names in it.

    ValueError where it is not installed, cannot be loaded or is a version without one of them.
    """
    needs = f"{flag} needs {package}"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{needs}, which is not installed")
    try:
        library = importlib.import_module(module)
    except Exception as error:  # whatever a library of compiled parts raises where these do not fit
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{needs}, and what is installed cannot be loaded ({type(error).__name__}: {reason})"
        ) from error
    missing = [name for name in names if not hasattr(library, name)]
    if missing:
        raise ValueError(f"{needs}, and what is installed has no {missing[0]}: install another version")
    return library
