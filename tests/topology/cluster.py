"""A prefill server, a decode server and a router as three commands, as a deployment starts them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.server_process import ServerProcess, held_port, wait_until

MODEL = "tiny-qwen3-moe"
TINY = ("--model-path", MODEL, "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
# Nobody is taken for dead or late, however loaded the machine. A test that waits for such an end sets its own bounds.
PATIENCE = (
    "--disaggregation-heartbeat-interval=0.5",
    "--disaggregation-heartbeat-failures=120",
    "--disaggregation-bootstrap-timeout=60",
    "--disaggregation-waiting-timeout=60",
)
# One for all, because making one takes as long as many steps, and no connection that a server might be closing.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


class Cluster:
    """Members are started by name; one that has ended can be started again at its old address.

    They are prefill, decode and router, and with num_each=2 prefill2 and decode2 as well. router_words: the command
    line of the router, for another one.
    """

    def __init__(
        self,
        prefill_args: tuple[str, ...] = (),
        decode_args: tuple[str, ...] = (),
        router_args: tuple[str, ...] = (),
        model_args: tuple[str, ...] = (*TINY, "--max-total-tokens", "4096"),
        backend: str = "tcp",
        num_each: int = 1,
    ) -> None:
        common = (*model_args, *PATIENCE, f"--disaggregation-transfer-backend={backend}")
        self._commands: dict[str, tuple[str, ...]] = {}
        self.urls: dict[str, str] = {}
        servers: list[str] = []
        # As long as the cluster lives, so that no connection takes one while its member is away.
        self._held = [held_port() for _ in range(3 * num_each + 1)]
        ports = [held.getsockname()[1] for held in self._held]
        for suffix in ("", "2")[:num_each]:
            port, bootstrap_port, decode_port = ports.pop(), ports.pop(), ports.pop()
            if not suffix:
                self.bootstrap_port = bootstrap_port
            self._add(
                f"prefill{suffix}",
                port,
                "--disaggregation-mode=prefill",
                f"--disaggregation-bootstrap-port={bootstrap_port}",
                *common,
                *prefill_args,
            )
            self._add(f"decode{suffix}", decode_port, "--disaggregation-mode=decode", *common, *decode_args)
            servers += ["--prefill", self.urls[f"prefill{suffix}"], str(bootstrap_port)]
            servers += ["--decode", self.urls[f"decode{suffix}"]]
        self.router_words = ("--disaggregation-mode=router", *servers, *router_args)
        self._add("router", ports.pop(), *self.router_words)
        self.processes: dict[str, ServerProcess] = {}
        self._started: set[str] = set()

    def _add(self, name: str, port: int, *words: str) -> None:
        self._commands[name] = (f"--port={port}", *words)
        self.urls[name] = f"http://127.0.0.1:{port}"

    @property
    def url(self) -> str:
        return self.urls["router"]

    def start(self, *names: str) -> None:
        """All at once; returns when they and the router are ready."""
        for name in names:
            self.processes[name] = ServerProcess(*self._commands[name])
        self._started |= set(names)
        for name in names:
            self.processes[name].wait_ready()
        if "router" in self.processes:
            self.wait_routable()

    def wait_routable(self) -> None:
        """Until the router has a server of each role."""
        wait_until(lambda: HTTP.get(f"{self.url}/ready").status_code == 200, what="the router is ready")

    def stop(self, *names: str) -> None:
        for name in names or list(self.processes):
            self.processes.pop(name).stop()

    def close(self) -> None:
        self.stop()
        for held in self._held:
            held.close()

    def pids(self) -> dict[str, list[int]]:
        """Of every member and its ranks."""
        return {
            name: [process.process.pid, *sorted(rank.pid for rank in process.ranks())]
            for name, process in self.processes.items()
        }

    def loads(self, name: str) -> list[dict[str, Any]]:
        """What each rank has reported last, which may be half a second ago."""
        return list(HTTP.get(f"{self.urls[name]}/get_load").json())

    def states(self, name: str) -> list[dict[str, Any]]:
        """What each rank says when it is asked now, in the fields of a LoadReport."""
        return list(HTTP.get(f"{self.urls[name]}/server_info").json()["internal_states"])

    def count(self, name: str, *queues: str) -> int:
        """Requests that are now in these queues of a server."""
        return sum(int(state[f"{queue}_requests"]) for state in self.states(name) for queue in queues)

    def wait_drained(self, *names: str, timeout: float = 60.0) -> None:
        """Until no request is left in any queue, no KV token is in use, and no room is left."""
        for name in names or [name for name in self.processes if name != "router"]:
            wait_until(lambda name=name: not self.is_busy(name), timeout, f"{name} is drained")  # type: ignore[misc]

    def is_busy(self, name: str) -> bool:
        """By what its ranks say now or have said in their last report."""
        queues = ("running", "waiting", "bootstrapping", "sending", "connecting", "receiving")
        left = ("used_tokens", "waiting_tokens", "transfer_rooms", *(f"{queue}_requests" for queue in queues))
        return any(state[field] for state in self.states(name) for field in left) or any(
            value for load in self.loads(name) for field, value in load.items() if field.startswith("num_")
        )

    @contextmanager
    def kept_whole(self, prompt: str, text: str) -> Iterator[None]:
        """Checks that what the block left is whole: nothing in any queue, the same processes but for those that the
        block itself has started again, and `text` after `prompt`. If it is not, all servers are started anew, so that
        only the test at fault fails."""
        before = self.pids()
        self._started.clear()
        yield
        try:
            after = self.pids()
            assert after.keys() == before.keys()
            assert {name for name in before if before[name] != after[name]} <= self._started
            self.wait_drained()
            call = Call(self.url, prompt).wait()
            assert (call.error, call.text) == (None, text)
            self.wait_drained()
            for process in self.processes.values():
                assert "memory leak" not in process.stderr()
        except Exception:
            self.stop()
            self.start(*self.urls)
            raise


@contextmanager
def cluster_of(**settings: object) -> Iterator[Cluster]:
    cluster = Cluster(**settings)  # type: ignore[arg-type]
    try:
        cluster.start(*cluster.urls)
        yield cluster
    finally:
        cluster.close()


class Call:
    """One completion in a thread. `text` so far, and once it has ended `status` and `error` (None: went well)."""

    def __init__(self, url: str, prompt: str | list[int], max_tokens: int = 8, **fields: object) -> None:
        self.body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self.body |= {"stream": True} | fields
        self.text = ""
        self.status: int | None = None
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.started = threading.Event()
        self.began = time.monotonic()
        self.seconds = 0.0
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._connection.connect()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            headers = {"content-type": "application/json"}
            self._connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
            response = self._connection.getresponse()
            self.status = response.status
            if self.status != 200:
                self.error = response.read().decode()
                return
            done = False
            for line in response:
                done |= self._take(line.decode().strip())
            if not done and self.error is None:
                self.error = "the stream ended without [DONE]"
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            self.seconds = time.monotonic() - self.began

    def _take(self, line: str) -> bool:
        if not line.startswith("data: "):
            return False
        if line == "data: [DONE]":
            return True
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = event["error"]["message"]
            return False
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.started.set()
        return False

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float = 120.0) -> Call:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no answer within {timeout} s"
        return self

    def leave(self) -> None:
        """Close the connection from this side, unless the call has ended."""
        sock = self._connection.sock
        with suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
