"""Settings of the router, in one frozen value."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from server.config import ParentLink, StartupError
from server.hosts import is_host

POLICIES = ("shortest_queue", "round_robin", "random", "power_of_two", "cache_aware")


class PrefillAddress(msgspec.Struct, frozen=True):
    """url: of the prefill server. bootstrap_port: of its bootstrap server; None leaves it to the decode server."""

    url: str
    bootstrap_port: int | None = None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One field a command-line flag of the same name.

    prefill, decode: the servers to route to; URLs as `server_url` gives them. At least one of each.
    policy: how a server of each role is chosen; one of POLICIES.
    host, port, api_key, max_request_bytes, request_read_timeout, client_timeout, shutdown_timeout, parent_link,
        log_level, log_requests: as in ServerConfig.
    max_prefill_requests, max_decode_requests: requests at one server at a time; more wait in the router.
    max_queued_requests: requests that may wait; more are answered with 503 at once.
    queue_timeout: seconds a request may wait before it is answered with 503.
    request_timeout: seconds a whole request may take. connect_timeout: seconds to open a connection to a server.
    retries: further attempts of a request that failed before anything was sent to its client.
    health_interval, health_timeout: seconds between two health checks of a server, and for one to be answered.
    health_failures: checks in a row without an answer after which a server is given up, its requests with it.
    """

    prefill: tuple[PrefillAddress, ...]
    decode: tuple[str, ...]
    policy: str = "shortest_queue"
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    max_request_bytes: int = 64 * 1024 * 1024
    request_read_timeout: float = 30.0
    client_timeout: float = 60.0
    max_prefill_requests: int = 256
    max_decode_requests: int = 1024
    max_queued_requests: int = 1024
    queue_timeout: float = 60.0
    request_timeout: float = 3600.0
    connect_timeout: float = 5.0
    retries: int = 2
    health_interval: float = 1.0
    health_timeout: float = 10.0
    health_failures: int = 2
    shutdown_timeout: float = 30.0
    parent_link: ParentLink | None = None
    log_level: str = "info"
    log_requests: bool = False


def server_url(text: str, flag: str) -> str:
    """The URL without a trailing slash; http:// may be left out. StartupError that names `flag`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise StartupError(f"{flag} {text}: not a URL of a server, such as http://10.0.0.1:30000")
    return url.rstrip("/")
