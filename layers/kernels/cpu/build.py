"""Compiles the C kernels for this machine, once per user, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_SOURCES = ("attention.c", "elementwise.c", "gemm.c")
_HEADERS = ("common.h",)
# Results must not depend on -ffast-math's reordering; the two relaxations below only concern errno and exception flags,
# and without them loops with a rounding or a comparison are not vectorised.
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
_COMPILERS = ("gcc", "cc")
_COMPILE_TIMEOUT_S = 120


class BuildError(Exception):
    """The kernels cannot be had on this machine; the message says why."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lockstep/kernels, ~/.cache by default."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "lockstep" / "kernels"


def load(folder: Path | None = None, search_path: str | None = None) -> ctypes.CDLL:
    """The compiled kernels, built first where `folder` (the user's cache by default) does not hold them.

    search_path: where compilers are looked for, like PATH. BuildError when there is no compiler, it fails, or torch
    has no OpenMP runtime to share.
    """
    if os.name != "posix":
        raise BuildError(f"no support for {platform.system()}")
    _share_openmp()
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name, path=search_path))), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({' or '.join(_COMPILERS)}) on the PATH")
    library = (folder or cache_folder()) / f"cpu-{_key(compiler)}.so"
    try:
        if not library.exists():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(str(error)) from error


def _key(compiler: str) -> str:
    """Digest of everything that the compiled result depends on."""
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join((*_FLAGS, compiler, version, platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What -march=native looks at; a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model", "Features", "CPU part"))}))


def _compile(compiler: str, library: Path) -> None:
    """Compile into `library` by one rename, so that several processes may do it at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        objects = []
        for source in _SOURCES:
            objects.append(os.path.join(temporary, f"{source}.o"))
            _run([compiler, *_FLAGS, "-c", str(_FOLDER / source), "-o", objects[-1]])
        output = os.path.join(temporary, "kernels.so")
        # Linked without -fopenmp: the OpenMP functions come from the runtime that torch has loaded, because two
        # runtimes in one process would each keep a pool of spinning threads.
        _run([compiler, "-shared", *objects, "-o", output, "-lm"])
        os.replace(output, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_COMPILE_TIMEOUT_S} s") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {reason}")


def _share_openmp() -> None:
    """Make the symbols of the OpenMP runtime that torch uses visible to libraries loaded later."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise BuildError("cannot tell which OpenMP runtime torch uses") from error
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    runtimes = sorted(path for path in loaded if os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp")))
    if not runtimes:
        raise BuildError("torch has no OpenMP runtime to share")
    ours = [path for path in runtimes if path.startswith(os.path.dirname(torch.__file__))]
    ctypes.CDLL((ours or runtimes)[0], mode=ctypes.RTLD_GLOBAL)
