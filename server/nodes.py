"""Where the hosts of one engine meet, and by which network interface."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

from server.config import StartupError

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class MeetingPoint:
    """The store of an engine on several hosts, as one of them sees it.

    host: address of node 0, numeric. own_host: of this host, on the way there. interface: the one that has own_host.
    listener: on node 0, its socket.
    """

    host: str
    port: int
    own_host: str
    interface: str
    listener: socket.socket | None = None


def parse_address(word: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6 address]:port". StartupError for anything else."""
    host, colon, port = word.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not is_v6) or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise StartupError(f"--dist-init-addr {word} is not HOST:PORT, with an IPv6 address in brackets")
    return host.strip("[]"), int(port)


def resolve(host: str, port: int) -> str:
    """The numeric address of a host. StartupError when it has none."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--dist-init-addr {host} cannot be resolved ({why_unresolved(error)})") from error


def why_unresolved(error: OSError | UnicodeError) -> str:
    """error: of `socket.getaddrinfo`."""
    return "not a host name" if isinstance(error, UnicodeError) else str(error.strerror)


def way_towards(host: str) -> tuple[str, str]:
    """(own address, interface) by which packets to the address leave. StartupError without a route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing, but has the kernel choose an address of this host
        except OSError as error:
            raise StartupError(f"--dist-init-addr {host} cannot be reached ({error.strerror})") from error
        own = str(probe.getsockname()[0])
    for name, address in _interface_addresses(family):
        if address == own:
            return own, name
    raise StartupError(f"no network interface has the address {own}, which leads to --dist-init-addr {host}")


def _interface_addresses(family: int) -> list[tuple[str, str]]:
    """(name, address) of the interfaces that have an address of the family."""
    if family == socket.AF_INET6:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
        return [(row[5], socket.inet_ntop(family, bytes.fromhex(row[0]))) for row in rows]
    found = []
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found
