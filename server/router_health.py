"""Health checks of the servers behind the router, so that requests go only where they are answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp
import msgspec

from server.router_config import RouterConfig
from server.router_workers import Worker

# /health waits for the engine, which a long step holds up: slow is not wrong, and the server itself says when it is.
_ENGINE_TIMEOUT = 60.0
# It costs the engine a moment, which an idle one should rather sleep: asked once in so many health checks of a server
# that is well.
_ENGINE_EVERY = 5
_MAX_REASON = 300


async def watch(
    worker: Worker, session: aiohttp.ClientSession, config: RouterConfig, changed: Callable[[], None]
) -> None:
    """Checks the server for ever; `changed` is called when it becomes healthy or ceases to be.

    /ready is answered by the server's HTTP process and tells whether it lives and takes requests; /health is answered
    by its engine. A server without /ready has only /health.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(_watch_process(worker, session, config, changed))
        group.create_task(_watch_engine(worker, session, config, changed))


async def _watch_process(
    worker: Worker, session: aiohttp.ClientSession, config: RouterConfig, changed: Callable[[], None]
) -> None:
    missed = 0
    while True:
        try:
            status, reason = await _get(session, worker.url + "/ready", config.health_timeout)
            if status == 404:
                status, reason = await _get(session, worker.url + "/health", config.health_timeout)
        except TimeoutError:
            missed += 1
            problem = f"it has not answered for {config.health_timeout:g} s (--health-timeout)"
            # One late answer may be the router's own fault.
            certain = missed >= config.health_failures
        except (aiohttp.ClientError, OSError) as error:
            missed += 1
            problem = describe(error)
            certain = True
        else:
            missed = 0
            problem = "" if status == 200 else f"it answers {status}: {reason}"
            certain = True
        if certain and worker.note("answers", problem):
            changed()
        if missed >= config.health_failures:
            worker.give_up(f"has failed {missed} health checks: {problem}")
        await asyncio.sleep(config.health_interval)


async def _watch_engine(
    worker: Worker, session: aiohttp.ClientSession, config: RouterConfig, changed: Callable[[], None]
) -> None:
    while True:
        # Whether the server can be reached is the other check's business.
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            status, reason = await _get(session, worker.url + "/health", _ENGINE_TIMEOUT)
            if worker.note("engine", "" if status == 200 else f"its /health answers {status}: {reason}"):
                changed()
        await asyncio.sleep((_ENGINE_EVERY if worker.healthy else 1) * config.health_interval)


async def _get(session: aiohttp.ClientSession, url: str, timeout: float) -> tuple[int, str]:
    """(status, the reason in the body of one other than 200)."""
    async with asyncio.timeout(timeout), session.get(url) as response:
        body = await response.read()
        return response.status, "" if response.status == 200 else error_message(body)


def error_message(body: bytes) -> str:
    """The message in an error body, or its beginning where it has none."""
    with contextlib.suppress(msgspec.DecodeError, AttributeError, KeyError):
        content = msgspec.json.decode(body)
        found = content.get("error", content)
        return str(found["message"] if isinstance(found, dict) else found)[:_MAX_REASON]
    return body[:_MAX_REASON].decode(errors="replace")


def describe(error: BaseException) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({error.os_error.strerror or error.os_error})"
    if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return "the connection broke"
    return f"{type(error).__name__}: {error}"
