"""One request on its way: the same body to a prefill and a decode server, and decode's answer to the client.

Until something was sent to the client, a failure of either server is answered by another attempt with new rooms. After
that a failure ends the stream with an error event; prefill's end does not matter any more then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import aiohttp
from fastapi import Response
from starlette.types import Receive, Scope, Send

from scheduler.messages import STATUS_UNFIT
from server.errors import ApiError
from server.http_common import error_response
from server.router_body import RoutedBody
from server.router_health import describe, error_message
from server.router_state import RouterState
from server.router_workers import Pair, Worker, WorkerError

logger = logging.getLogger(__name__)

# What other servers, or the same a little later, may answer differently.
_RETRIED_STATUSES = frozenset((429, 500, 502, 503, 504))
_BACKOFF = 0.05
# A prefill server that still works on a request which decode has answered has so long to end it.
_PREFILL_GRACE = 30.0
_DONE = b"data: [DONE]\n\n"
# They belong to one connection, or are written anew for the next; and what is compressed cannot be cut into events.
_OWN_HEADERS = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "date",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    )
)


class LegError(Exception):
    """A server could not do its part. status, body: what it answered; 502 and no body when it did not."""

    def __init__(self, worker: Worker, message: str, status: int = 502, body: bytes = b"") -> None:
        super().__init__(message)
        self.worker = worker
        self.status = status
        self.body = body


class _Events:
    """Cuts a stream of server-sent events between events, so that a part of one never reaches the client."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = b""

    def push(self, data: bytes) -> bytes:
        """The whole events there are now."""
        if self._rest:
            data = self._rest + data
        cut = data.rfind(b"\n\n") + 2
        if b"\r" in data:
            cut = max(cut, data.rfind(b"\r\n\r\n") + 4)
        if cut < 4:  # not found
            cut = 0
        else:
            self._last = data[max(0, cut - 32) : cut]
        self._rest = data[cut:]
        return data[:cut]

    @property
    def complete(self) -> bool:
        """Whether the last event was `[DONE]`, and nothing follows it."""
        return not self._rest and self._last.rstrip().endswith(b"data: [DONE]")


@dataclass
class _Answer:
    """The beginning of decode's answer: the whole body (`events` is None), or the first events of a stream."""

    response: aiohttp.ClientResponse
    data: bytes
    events: _Events | None


class Exchange(Response):
    """A response that does all its work when it is sent.

    headers: what goes to the servers. request_id: what logs call the request; the client gets it back.
    arrived: `time.monotonic()` when the request came.
    """

    def __init__(
        self,
        state: RouterState,
        path: str,
        body: RoutedBody,
        headers: Mapping[str, str],
        request_id: str,
        arrived: float,
    ) -> None:
        super().__init__()
        self.rids = body.rids
        self._state = state
        self._path = path
        self._body = body
        self._outbound = headers
        self._request_id = request_id
        self._arrived = arrived
        self._aborted = False
        self._waiting = False
        self._started = False
        self._failed = False
        self._end: ApiError | None = None
        self._pair: Pair | None = None
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.enter(self)
        self._work = asyncio.create_task(self._run(send))
        watcher = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait((self._work, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        finally:
            self._work.cancel()
            watcher.cancel()
            self._state.leave(self)
            self._state.metrics.request_seconds.observe(time.monotonic() - self._arrived)

    def abort(self) -> None:
        self._aborted = True
        if self._waiting:
            self.end(ApiError(400, "the request was aborted before it reached a server", code="aborted"))

    def end(self, error: ApiError) -> None:
        if self._work is not None and not self._work.done() and not self._failed and self._end is None:
            self._end = error
            self._work.cancel()

    async def _run(self, send: Send) -> None:
        """Answers the client whatever happens, unless it is the client who goes."""
        timeout = self._state.config.request_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._try_pairs(send)
            self._ended("ok")
        except asyncio.CancelledError:
            if self._end is None:
                self._ended("abort")
                raise
            await self._fail(send, self._end)
        except TimeoutError:
            message = f"the request took longer than {timeout:g} s (--request-timeout)"
            await self._fail(send, ApiError(504, message, code="timeout"))
        except (ApiError, LegError) as error:
            await self._fail(send, error)
        except Exception:
            logger.exception("request %s failed", self._request_id)
            await self._fail(send, ApiError(500, "internal error"))

    def _ended(self, outcome: str) -> None:
        self._state.metrics.ended(outcome)
        if self._state.config.log_requests:
            servers = f"{self._pair.prefill} and {self._pair.decode}" if self._pair is not None else "no server"
            seconds = time.monotonic() - self._arrived
            logger.info("request %s %s by %s: %s after %.3f s", self._request_id, self._path, servers, outcome, seconds)

    async def _try_pairs(self, send: Send) -> None:
        dispatcher, retries = self._state.dispatcher, self._state.config.retries
        avoid: set[Worker] = set()
        unfit: set[Pair] = set()
        for attempt in range(retries + 1):
            self._waiting = True
            try:
                pair = await dispatcher.acquire(self._body.prefix, avoid)
            finally:
                self._waiting = False
            if attempt == 0:
                self._state.metrics.queue_seconds.observe(time.monotonic() - self._arrived)
            self._pair = pair
            try:
                await self._attempt(pair, send)
                return
            except LegError as error:
                if error.status == STATUS_UNFIT:
                    unfit.add(pair)
                    avoid |= {pair.prefill, pair.decode}
                    again = dispatcher.has_pair_besides(unfit)
                else:
                    avoid.add(error.worker)
                    again = error.status in _RETRIED_STATUSES
                if not again or self._started or self._aborted or attempt == retries:
                    raise
                logger.warning("request %s: %s; trying again", self._request_id, error)
                self._state.metrics.retried(error.worker.role)
            await asyncio.sleep(_BACKOFF * 2**attempt * random.uniform(0.75, 1.25))

    async def _attempt(self, pair: Pair, send: Send) -> None:
        body = self._body.for_pair(pair.prefill.address)
        prefill = self._state.spawn(self._drain_prefill(pair.prefill, body))
        prefill.add_done_callback(lambda task: self._after_prefill(pair.prefill, task))
        decode = asyncio.create_task(self._begin_decode(pair.decode, body))
        try:
            answer = await _first_of(prefill, decode)
            await self._pass_on(pair.decode, answer, send)
            self._state.spawn(_end_in_time(prefill))
        except BaseException:
            prefill.cancel()
            decode.cancel()
            await asyncio.wait((prefill, decode))
            raise
        finally:
            if decode.done() and not decode.cancelled() and decode.exception() is None:
                decode.result().response.close()
            self._state.dispatcher.release(pair.decode)

    def _after_prefill(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._state.dispatcher.release(worker)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("request %s: %s", self._request_id, error)

    async def _drain_prefill(self, worker: Worker, body: bytes) -> None:
        """Returns when prefill has done its part; what it answers is decode's to say."""
        with self._leg(worker):
            async with self._post(worker, body) as response:
                await self._check(worker, response)
                async for _ in response.content.iter_any():
                    pass

    async def _begin_decode(self, worker: Worker, body: bytes) -> _Answer:
        with self._leg(worker):
            response = await self._post(worker, body)
            try:
                await self._check(worker, response)
                if not response.content_type.startswith("text/event-stream"):
                    return _Answer(response, await response.read(), None)
                events, data = _Events(), b""
                while not data:
                    data = events.push(await _read(worker, response))
                return _Answer(response, data, events)
            except BaseException:
                response.close()
                raise

    async def _pass_on(self, worker: Worker, answer: _Answer, send: Send) -> None:
        self._state.metrics.first_byte_seconds.observe(time.monotonic() - self._arrived)
        response, events, data = answer.response, answer.events, answer.data
        headers = self._reply_headers(response.raw_headers)
        if events is None:
            headers.append((b"content-length", b"%d" % len(data)))
        self._started = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        while events is not None and not events.complete:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            with self._leg(worker):
                data = events.push(await _read(worker, response))
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _post(self, worker: Worker, body: bytes) -> aiohttp.client._RequestContextManager:
        return self._state.session.post(
            worker.url + self._path, data=body, headers=self._outbound, allow_redirects=False
        )

    async def _check(self, worker: Worker, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            body = await response.read()
            message = f"{worker} answers {response.status}: {error_message(body)}"
            raise LegError(worker, message, response.status, body)

    @contextlib.contextmanager
    def _leg(self, worker: Worker) -> Iterator[None]:
        """Turns what goes wrong with a connection into LegError, and tells when nobody listens at its other end."""
        try:
            with worker.guard():
                yield
        except WorkerError as error:
            raise LegError(worker, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and worker.note("answers", describe(error)):
                self._state.dispatcher.wake()
            raise LegError(worker, f"{worker}: {describe(error)}") from error

    async def _fail(self, send: Send, error: ApiError | LegError) -> None:
        self._failed = True
        # A client's own error is no news here, as it is none on a server.
        level = logging.WARNING if error.status >= 500 else logging.DEBUG
        logger.log(level, "request %s: %s", self._request_id, error)
        shown = error if isinstance(error, ApiError) else ApiError(error.status, str(error), code="server_failed")
        if self._started:
            self._ended("broken")
            event = b"data: " + shown.body() + b"\n\n" + _DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        self._ended("error")
        self._state.metrics.rejected(shown.status)
        response = error_response(shown)
        if isinstance(error, LegError) and error.body:
            response.body = error.body
            response.headers["content-length"] = str(len(error.body))
        response.headers["x-request-id"] = self._request_id
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    def _reply_headers(self, raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        kept = [(name.lower(), value) for name, value in raw if name.lower().decode("latin-1") not in _OWN_HEADERS]
        return [*kept, (b"x-request-id", self._request_id.encode("latin-1"))]


def outbound_headers(headers: Mapping[str, str], request_id: str | None) -> dict[str, str]:
    """A client's headers, authorization and tracing among them, as a server gets them."""
    kept = {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}
    named = {} if request_id is None else {"x-request-id": request_id}
    return {"content-type": "application/json"} | kept | named


async def _read(worker: Worker, response: aiohttp.ClientResponse) -> bytes:
    """The next bytes of a stream that has not come to its end. LegError when it has."""
    data = await response.content.readany()
    if not data:
        raise LegError(worker, f"{worker} ended a stream before [DONE]")
    return data


async def _first_of(prefill: asyncio.Task[None], decode: asyncio.Task[_Answer]) -> _Answer:
    """Decode's answer; the error of whichever fails before there is one."""
    waiting: set[asyncio.Task[None] | asyncio.Task[_Answer]] = {prefill, decode}
    while not decode.done():
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done():
            waiting.discard(prefill)
            if not decode.done():
                prefill.result()
    error = decode.exception()
    if error is not None and prefill.done():
        # What the client did wrong explains best why both have failed.
        cause = prefill.exception()
        if isinstance(cause, LegError) and cause.status < 500:
            raise cause
    return decode.result()


async def _end_in_time(prefill: asyncio.Task[None]) -> None:
    _, running = await asyncio.wait((prefill,), timeout=_PREFILL_GRACE)
    for task in running:
        task.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
