"""Hosts as clients and users write them."""

from __future__ import annotations

import ipaddress
import re
import socket

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_MAX_NAME = 253


def is_host(text: str) -> bool:
    """Whether it is an IPv4 address, an IPv6 address without brackets, or a name that DNS can hold (RFC 1123, IDNA)."""
    if ":" in text:
        return _is_ipv6(text)
    try:
        name = text.encode("idna").decode()
    except UnicodeError:
        return False
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        return False
    # No top-level domain is a number.
    return not name.rstrip(".").rpartition(".")[2].isdecimal() or _is_ipv4(name)


def _is_ipv4(text: str) -> bool:
    try:
        socket.inet_aton(text)  # takes the short forms that a resolver takes too
    except OSError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
