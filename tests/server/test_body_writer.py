"""Parts of a body reach a client in order, whether it keeps up or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from server.body_writer import BodyWriter

pytestmark = pytest.mark.timeout(60)


class Client:
    """An ASGI `send` that waits while `full` is set, as a server's does when its buffer is."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False
        self.waiting = 0
        self.space = asyncio.Event()
        self.space.set()
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        self.waiting += 1
        try:
            await self.wait()
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error
        self.parts.append(message["body"])
        self.complete = not message["more_body"]

    async def wait(self) -> None:
        if not self.space.is_set():
            await self.space.wait()


class Body(BodyWriter):
    """Has parts to say; `rendered` counts how often it was asked for them."""

    def __init__(self, client: Client) -> None:
        self.unsent: list[bytes] = []
        self.rendered = 0
        super().__init__(client.send, self.take)

    def take(self) -> bytes:
        self.rendered += 1
        data = b"".join(self.unsent)
        self.unsent.clear()
        return data

    def write(self, part: bytes) -> None:
        self.unsent.append(part)
        self.flush()


def run(test: Callable[[Client, Body], Awaitable[None]]) -> None:
    async def main() -> None:
        client = Client()
        await test(client, Body(client))

    asyncio.run(main())


def test_a_client_that_keeps_up_gets_each_part_at_once() -> None:
    async def test(client: Client, body: Body) -> None:
        body.write(b"a")
        body.write(b"b")
        assert client.parts == [b"a", b"b"]
        await body.end(b"c")
        assert (client.parts, client.complete) == ([b"a", b"b", b"c"], True)

    run(test)


def test_a_client_that_does_not_gets_the_rest_when_it_reads() -> None:
    async def test(client: Client, body: Body) -> None:
        body.write(b"a")
        client.space.clear()
        for part in (b"b", b"c", b"d"):
            body.write(part)
        assert (client.parts, client.waiting) == ([b"a"], 1)
        assert body.rendered == 2  # not for a client that does not read
        ending = asyncio.create_task(body.end(b"z"))
        await asyncio.sleep(0)
        assert (client.parts, client.complete) == ([b"a"], False)
        client.space.set()
        await ending
        assert client.parts == [b"a", b"b", b"cd", b"z"]
        assert client.complete

    run(test)


def test_once_it_has_caught_up_parts_go_out_at_once_again() -> None:
    async def test(client: Client, body: Body) -> None:
        client.space.clear()
        body.write(b"a")
        client.space.set()
        while client.waiting or not client.parts:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        body.write(b"b")
        assert client.parts == [b"a", b"b"]

    run(test)


def test_closing_ends_the_wait() -> None:
    async def test(client: Client, body: Body) -> None:
        client.space.clear()
        body.write(b"a")
        body.write(b"b")
        await asyncio.sleep(0)
        body.close()
        while client.waiting:
            await asyncio.sleep(0)
        client.space.set()
        await asyncio.sleep(0)
        assert client.parts == []

    run(test)


@pytest.mark.parametrize("full", [False, True])
def test_a_failure_to_send_is_not_lost(full: bool) -> None:
    async def test(client: Client, body: Body) -> None:
        client.error = OSError("broken")
        if full:
            client.space.clear()
            body.write(b"a")
            client.space.set()
            with pytest.raises(OSError, match="broken"):
                await body.end(b"z")
        else:
            with pytest.raises(OSError, match="broken"):
                body.write(b"a")

    run(test)
