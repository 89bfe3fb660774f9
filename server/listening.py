"""Addresses of a server: where it listens, where others reach it, where the hosts of an engine meet."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import uuid

from scheduler.config import HandOverAddress, bracketed
from server import nodes
from server.config import ServerConfig, StartupError
from server.nodes import MeetingPoint

logger = logging.getLogger(__name__)

BACKLOG = 2048
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket. StartupError when the address cannot be had.

    host: name, IPv4 or IPv6 address (brackets allowed). port: 0 lets the system choose. flag: the one that sets it.

    It listens at once, because two sockets may be bound to one port as
    long as neither listens.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = f"--host {host} cannot be resolved ({nodes.why_unresolved(error)}): use an address of this machine"
        raise StartupError(reason) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(_explain_bind(error, host, port, flag)) from error
    return listener


def notice_lost_clients(listener: socket.socket, timeout: float) -> None:
    """Has its connections end whose other machine has not answered for `timeout` seconds.

    A client that lives but has read nothing for as long, with all buffers full, is taken for gone too.
    """
    # Accepted connections inherit these. Probes are for connections on which nothing is under way; what is under way
    # would be sent again for a quarter of an hour.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, share in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 6)):
        listener.setsockopt(socket.IPPROTO_TCP, option, max(1, round(timeout / share)))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout * 1000))


def listen_bootstrap(config: ServerConfig, meeting: MeetingPoint | None = None) -> socket.socket | None:
    """Where a prefill server's bootstrap server listens; None for a server that has none. StartupError as `listen`."""
    if not has_bootstrap_server(config):
        return None
    listener = listen(config.host, config.disaggregation_bootstrap_port, "--disaggregation-bootstrap-port")
    if meeting is not None and not _is_reached_from_nodes(listener, meeting):
        listener.close()
        every = "::" if ":" in meeting.host else "0.0.0.0"
        raise StartupError(
            f"--host {config.host} is not reached from the other nodes, whose ranks register at the bootstrap server "
            f"there: use --host {meeting.host}, or {every} for every interface"
        )
    return listener


def has_bootstrap_server(config: ServerConfig) -> bool:
    """Of an engine on several hosts, node 0 alone has it."""
    return config.engine.disaggregation_mode == "prefill" and config.engine.disaggregation_transfer_backend != "fake"


def check_kv_host(config: ServerConfig) -> None:
    """StartupError when the ranks could not listen on --disaggregation-kv-host."""
    host = config.disaggregation_kv_host
    if host is None:
        return
    try:
        listen(host, 0).close()
    except StartupError as error:
        raise StartupError(
            f"--disaggregation-kv-host {host} is not an address of this machine: name one at which others reach it"
        ) from error


def meet(config: ServerConfig) -> MeetingPoint | None:
    """Where this host meets the others of its engine; None for an engine on one. StartupError as `listen`."""
    engine = config.engine
    if engine.nnodes == 1 or engine.dist_init_addr is None:
        return None
    host, port = nodes.parse_address(engine.dist_init_addr)
    if host in _EVERY_INTERFACE:
        raise StartupError(f"--dist-init-addr {host} is every interface: name the address at which others reach node 0")
    address = nodes.resolve(host, port)
    listener = listen(address, port, "--dist-init-addr") if engine.node_rank == 0 else None
    if _is_loopback(address):
        logger.warning("--dist-init-addr %s is %s here, which no other host can reach", host, address)
    return MeetingPoint(address, port, *nodes.way_towards(address), listener)


def hand_over_address(
    config: ServerConfig,
    listener: socket.socket,
    bootstrap_listener: socket.socket | None = None,
    meeting: MeetingPoint | None = None,
) -> HandOverAddress | None:
    """Of the ranks on this host; None where nothing is handed over.

    listener: of HTTP. bootstrap_listener: of a prefill server, on node 0. meeting: of an engine on several hosts.
    """
    if config.engine.disaggregation_mode == "null":
        return None
    host, bootstrap = reachable_host(config.host), ""
    if bootstrap_listener is not None:
        bootstrap = base_url(bootstrap_listener).removeprefix("http://")
    # On several hosts the way between them leads to each; what --host says need not.
    is_open = config.host.strip("[]") in _EVERY_INTERFACE
    if meeting is not None and (is_open or _is_loopback(listener.getsockname()[0])):
        host = meeting.own_host
    if bootstrap_listener is not None and meeting is not None and is_open:
        bootstrap = f"{bracketed(meeting.host)}:{bootstrap_listener.getsockname()[1]}"
    return HandOverAddress(bootstrap, config.disaggregation_kv_host or host, uuid.uuid4().hex)


def base_url(listener: socket.socket) -> str:
    """A URL that reaches the listener from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(_EVERY_INTERFACE.get(host, host))}:{port}"


def reachable_host(host: str) -> str:
    """An address at which other machines reach what listens on `host`; of this machine alone where it has no route."""
    host = host.strip("[]")
    if host not in _EVERY_INTERFACE:
        return host
    # Connecting a datagram socket sends nothing, but has the kernel choose a source address. The targets are
    # addresses reserved for documentation (RFC 5737, RFC 3849).
    family, target = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return _EVERY_INTERFACE[host]
        return str(probe.getsockname()[0])


def _is_reached_from_nodes(listener: socket.socket, meeting: MeetingPoint) -> bool:
    """As far as node 0 can tell."""
    host = listener.getsockname()[0]
    if host == "0.0.0.0":
        return ":" not in meeting.host
    return not _is_loopback(host) or _is_loopback(meeting.host)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _explain_bind(error: OSError, host: str, port: int, flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use: stop the other server, or choose another port with {flag}"
        case errno.EACCES:
            return f"port {port} needs privileges: choose one of at least 1024 with {flag}"
        case errno.EADDRNOTAVAIL if flag == "--dist-init-addr":
            return f"{flag} {host} is not an address of this machine, which is node 0: give others their --node-rank"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is not an address of this machine: use 127.0.0.1, or 0.0.0.0 for every interface"
    return f"cannot listen on {host} port {port} ({error.strerror}): choose others with --host and {flag}"
