"""Settings of local mode: prefill servers, decode servers and a router started by one command on this host."""

from __future__ import annotations

import msgspec

from server.config import ServerConfig
from server.router_config import RouterConfig


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """servers: what prefill and decode servers have in common; host, port and api_key are the router's, for clients.

    router: its lists of servers are empty, because their addresses are chosen at the start.
    num_prefill, num_decode: at least 1 each.
    """

    servers: ServerConfig
    router: RouterConfig
    num_prefill: int = 1
    num_decode: int = 1
