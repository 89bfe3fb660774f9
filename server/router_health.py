"""Health checks of the servers behind the router, so that requests go only where they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from server.router_config import RouterConfig
from server.router_workers import Worker

logger = logging.getLogger(__name__)

# /health waits for the engine, which a long step holds up: slow is not wrong, and the server itself says when it is.
_ENGINE_TIMEOUT = 60.0
# It costs the engine a moment, which an idle one should rather sleep: asked once in so many health checks of a server
# that is well.
_ENGINE_EVERY = 5
_MAX_REASON = 300


class _Ready(msgspec.Struct):
    """The part of an answer of /ready in which two servers have to agree."""

    hand_over: dict[str, str] = {}


async def watch(
    worker: Worker,
    others: Sequence[Worker],
    session: aiohttp.ClientSession,
    config: RouterConfig,
    changed: Callable[[], None],
) -> None:
    """Checks the server for ever; `changed` is called when it becomes healthy or ceases to be.

    others: the servers of the other role, one of which at least it has to fit.

    /ready is answered by the server's HTTP process and tells whether it lives and takes requests; /health is answered
    by its engine. A server without /ready has only /health.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(_watch_process(worker, others, session, config, changed))
        group.create_task(_watch_engine(worker, session, config, changed))


async def _watch_process(
    worker: Worker,
    others: Sequence[Worker],
    session: aiohttp.ClientSession,
    config: RouterConfig,
    changed: Callable[[], None],
) -> None:
    missed = 0
    waits = config.parent_link is None  # local mode starts the servers itself
    told = ""
    while True:
        try:
            status, body = await _get(session, worker.url + "/ready", config.health_timeout)
            if status == 404:
                status, body = await _get(session, worker.url + "/health", config.health_timeout)
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
            problem = f"it answers {status}: {error_message(body)}"
            if status == 200:
                worker.terms = _terms(body)
                problem = _wrong_role(worker, body) or worker.misfit(others)
            certain = True
        waits = waits and bool(problem)
        if waits and problem != told:
            told = problem
            logger.info("waiting for %s: %s", worker, problem)
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
            status, body = await _get(session, worker.url + "/health", _ENGINE_TIMEOUT)
            if worker.note("engine", "" if status == 200 else f"its /health answers {status}: {error_message(body)}"):
                changed()
        await asyncio.sleep((_ENGINE_EVERY if worker.healthy else 1) * config.health_interval)


async def _get(session: aiohttp.ClientSession, url: str, timeout: float) -> tuple[int, bytes]:
    """(status, body)."""
    async with asyncio.timeout(timeout), session.get(url) as response:
        return response.status, await response.read()


def _wrong_role(worker: Worker, body: bytes) -> str:
    """What is wrong where a server says that it does another part of a request: its answers would look right.

    Servers of other makes do not say what they do, and are believed.
    """
    try:
        mode = msgspec.json.decode(body)["disaggregation_mode"]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return ""
    if mode == worker.role:
        return ""
    return f"it runs with --disaggregation-mode {mode}, but the router was given it as --{worker.role}"


def _terms(body: bytes) -> dict[str, str]:
    """What a server says that those of the other role must have too; nothing where it is of another make."""
    try:
        return msgspec.json.decode(body, type=_Ready).hand_over
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


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
        number = error.os_error.errno
        # Names that cannot be resolved have negative numbers, and the event loop's text repeats the address.
        reason = os.strerror(number) if number is not None and number > 0 else error.os_error.strerror
        return f"cannot connect ({reason or error.os_error})"
    if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return "the connection broke"
    return f"{type(error).__name__}: {error}"
