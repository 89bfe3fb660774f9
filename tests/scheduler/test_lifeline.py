"""What a rank leaves behind when another is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scheduler.messages import STATUS_PEER_LOST

pytestmark = pytest.mark.timeout(120)

RANK_0 = """
import sys, threading
from scheduler.lifeline import Lifelines
print(Lifelines("127.0.0.1", int(sys.argv[1])).port, flush=True)
threading.Event().wait()
"""
RANK_1 = """
import sys, threading
from scheduler.lifeline import Lifeline
Lifeline("127.0.0.1", int(sys.argv[2]), 1, int(sys.argv[1]))
threading.Event().wait()
"""


@contextmanager
def rank(script: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and the file for its last word."""
    last_word = os.memfd_create("last word")
    command = [sys.executable, "-c", script, str(last_word), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, pass_fds=[last_word]) as process:
        try:
            yield process, last_word
        finally:
            process.kill()
            os.close(last_word)


def check_end(process: subprocess.Popen[str], last_word: int, own: int, lost: int) -> None:
    _, log = process.communicate(timeout=60)
    assert process.returncode == STATUS_PEER_LOST
    word = os.pread(last_word, 4096, 0).decode()
    assert word.startswith(f"rank {lost} is gone, on host 127.0.0.1") and word.count("\n") == 1
    assert log == f"error: rank {own} cannot go on without the others: {word}"


def test_rank_0_leaves_word_of_whom_it_lost() -> None:
    with rank(RANK_0) as (process, last_word):
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass  # somebody else, who does not count
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b'{"rank":1}\n')
        check_end(process, last_word, own=0, lost=1)


def test_others_leave_word_that_rank_0_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        with rank(RANK_1, str(listener.getsockname()[1])) as (process, last_word):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                assert lines.readline() == b'{"rank":1}\n'
            check_end(process, last_word, own=1, lost=0)
