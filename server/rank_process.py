"""Rank processes as the API process sees them: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from scheduler.config import RankSettings

_PACKAGES_ROOT = Path(__file__).resolve().parent.parent


class RankProcess:
    """One `python -m scheduler.rank`. It ends by itself when this process ends, however this process ends.

    rank: its number among those of all replicas.
    """

    def __init__(self, settings: RankSettings, interface: str = "lo") -> None:
        """settings: their ZeroMQ addresses are those that this process has bound or will bind.

        interface: by which the hosts of an engine reach each other.
        """
        config, peers = settings.config, settings.peers
        self.rank = settings.replica * config.tp_size + settings.rank
        environment = os.environ | {
            "RANK": str(settings.rank),
            "LOCAL_RANK": str(self.rank % config.ranks_per_node),
            "WORLD_SIZE": str(config.tp_size),
            # Iterations that a waiting compute thread spins before it sleeps; read when torch is imported. The default,
            # some 15 ms, keeps cores from the API process; much less puts threads to sleep within a step, which on two
            # quiet cores took a third off the speed of a single stream (2,000 against 50,000).
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "50000"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_PACKAGES_ROOT), os.environ.get("PYTHONPATH")])),
        }
        if config.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(config.num_threads)
        if peers is not None:
            environment |= {"MASTER_ADDR": peers.store_host, "MASTER_PORT": str(peers.store_port)}
            # gloo otherwise takes the address that the host's name resolves to, which need not lead anywhere.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            # Its store warns of every address without a name.
            environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # A fresh interpreter, not a fork: nothing of this process (sockets, threads, locks) is carried over. -P keeps
        # the folder the user happens to be in from shadowing modules. A process group of its own keeps Ctrl-C in the
        # terminal from ending ranks before their requests are drained; the session stays the same, because the kernel
        # weighs priorities within a session only.
        passed = [settings.refusals]
        self._last_word = -1
        if peers is not None:
            self._last_word = os.memfd_create("last word")
            passed += [peers.store_fd, self._last_word]
            settings = msgspec.structs.replace(
                settings, peers=msgspec.structs.replace(peers, last_word=self._last_word)
            )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler.rank"],
            stdin=subprocess.PIPE,
            env=environment,
            process_group=0,
            pass_fds=[number for number in passed if number >= 0],
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)  # readable once the process has ended
        assert self._process.stdin is not None
        # A rank that could not even start leaves a broken pipe; its end is reported by whoever watches the pidfd.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(settings) + b"\n")

    def returncode(self) -> int | None:
        """None while it runs; negative is the number of the signal that ended it."""
        return self._process.poll()

    def describe_end(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def lost_peer(self) -> str:
        """Which rank it has lost, after an end with STATUS_PEER_LOST; empty where it could not tell."""
        if self._last_word < 0:
            return ""
        return os.pread(self._last_word, 4096, 0).decode(errors="replace").partition("\n")[0]

    def ask_where(self) -> None:
        """Has it print its step, phase and stacks, in a step that hangs too."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Ends it whatever it does; `pidfd` tells when it is gone."""
        self._process.kill()

    def end(self, grace: float) -> None:
        """Waits `grace` seconds for it to end by itself, then ends it. A second call does nothing."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._last_word >= 0:
            os.close(self._last_word)
            self._last_word = -1
