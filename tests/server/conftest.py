"""An API process without an engine: the application served in a thread, in front of a fake rank."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from scheduler.config import EngineConfig
from server.app import create_app
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.http_server import HTTPServer, http_config
from server.tokenizer import ByteTokenizer, Tokenizer
from tests.server.fake_rank import FakeRank, Script, repeat_prompt

MODEL = "byte-model"
ENGINE = EngineConfig(model_path="tiny")


@dataclass
class Served:
    """A server on a port of its own. `loop` is its event loop, for what has to be called there."""

    client: EngineClient
    rank: FakeRank | None
    url: str
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    openai: openai.OpenAI

    def call(self, function: Any, *arguments: Any) -> None:
        """Runs `function` in the server's event loop and waits for it."""
        done = threading.Event()

        def run() -> None:
            function(*arguments)
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(60)

    def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Posts a body (bytes as they are) that must fail with `status`; returns the error object."""
        data = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = self.http.post(path, headers={"content-type": "application/json"}, **data)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextlib.contextmanager
def serve(
    *,
    script: Script = repeat_prompt,
    tokenizer: Tokenizer | None = None,
    with_rank: bool = True,
    max_running: int = 1000,
    engine: EngineConfig = ENGINE,
    **settings: Any,
) -> Iterator[Served]:
    config = ServerConfig(engine=engine, served_model_name=MODEL, **settings)
    client = EngineClient()
    app = create_app(config, client, tokenizer or ByteTokenizer())
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = HTTPServer(http_config(app, graceful_seconds=3.0, read_timeout=config.request_read_timeout))
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        started.set()
        await task

    def run() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    rank = FakeRank(client, script, max_running=max_running) if with_rank else None
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"authorization": "Bearer secret"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60) as http,
        openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0, timeout=60) as api,
    ):
        served = Served(client, rank, url, loops[0], http, api)
        try:
            if with_rank:
                asyncio.run_coroutine_threadsafe(client.wait_ready(), loops[0]).result(60)
            yield served
        finally:
            server.should_exit = True
            thread.join(60)
            if rank is not None:
                rank.close()
            client.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def background(
    served: Served, body: Any, path: str = "/v1/completions", method: str = "POST"
) -> Iterator[list[httpx.Response]]:
    """Sends a body in a thread; the list holds the response when the block ends."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(served.http.request(method, path, json=body)))
    thread.start()
    yield answers
    thread.join(90)
    assert len(answers) == 1


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with the default script, shared by the tests of a file."""
    with serve() as running:
        yield running
