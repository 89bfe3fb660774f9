"""Body fields with which a router says where a request is to be worked on.

Three join its prefill and its decode half, and one names the data-parallel rank of this server.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from disagg.bootstrap import FAKE_BOOTSTRAP_HOST, MAX_ROOM
from scheduler.messages import Bootstrap
from server.config import ServerConfig
from server.errors import bad_field
from server.hosts import is_host


class BootstrapFields(msgspec.Struct, kw_only=True):
    """Each is one value, or a list with one a sample (prompt 0 sample 0, prompt 0 sample 1, ...) or one a prompt.

    bootstrap_host: of the prefill server. bootstrap_port: of its bootstrap server; null for this server's own
    --disaggregation-bootstrap-port. bootstrap_room: 1 to 2**63 - 1, none twice; samples that share an entry, because a
    router has not counted n, get rooms made of it, the same on both sides. Checked by `bootstraps`,
    because a server that does both halves ignores them whatever they hold.

    routed_dp_rank: the data-parallel rank that is to work on the request, 0 to dp-size - 1; null for whichever the
    server chooses. Checked by `routed_dp_rank`.
    """

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: Any = None


def routed_dp_rank(body: BootstrapFields, num_ranks: int) -> int | None:
    """ApiError 400 unless null or one of the ranks."""
    rank = body.routed_dp_rank
    if rank is None:
        return None
    if type(rank) is not int or not 0 <= rank < num_ranks:
        raise bad_field("routed_dp_rank", f"must be a whole number from 0 to {num_ranks - 1}, not {_shown(rank)}")
    return rank


def check_rooms_lead_to(rank: int, rooms: Sequence[Bootstrap | None], num_ranks: int) -> None:
    """ApiError 400 where the decode side would look for a room at another of a prefill server's ranks than `rank`."""
    for bootstrap in rooms:
        if bootstrap is not None and bootstrap.room % num_ranks != rank:
            raise bad_field(
                "routed_dp_rank",
                f"is {rank}, but bootstrap_room {bootstrap.room} modulo --dp-size {num_ranks} is "
                f"{bootstrap.room % num_ranks}, where the decode side looks for the request; leave it out",
            )


def bootstraps(body: BootstrapFields, counts: Sequence[int], config: ServerConfig) -> list[Bootstrap | None]:
    """Where each sample is handed over; None for each on a server that does both halves. counts: samples a prompt.

    ApiError 400 that names the field for what is missing, out of range or there twice. On the fake path nobody meets,
    so that rooms are drawn where the body has none.
    """
    mode = config.engine.disaggregation_mode
    if mode == "null":
        return [None] * sum(counts)
    is_fake = config.engine.disaggregation_transfer_backend == "fake"
    found: list[Bootstrap | None] = []
    rooms: set[int] = set()
    hosts, ports, entries = (
        _spread(getattr(body, field), counts, field) for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    )
    for (host, _), (port, _), (room, number) in zip(hosts, ports, entries, strict=True):
        host = _host(host, required=mode == "decode" and not is_fake)
        port = _port(port)
        if (is_fake or host == FAKE_BOOTSTRAP_HOST) and room in (None, 0):
            room = draw_room()
        _check_room(room)
        room = _room_of(room, number)
        if room in rooms:
            raise bad_field("bootstrap_room", f"has {room} twice; every sample needs a room of its own")
        rooms.add(room)
        found.append(Bootstrap(host, config.disaggregation_bootstrap_port if port is None else port, room))
    return found


PROBE = BootstrapFields(bootstrap_host=FAKE_BOOTSTRAP_HOST)
"""Of a request of the server to itself, which takes the fake path on a server of any backend."""


def draw_room() -> int:
    """A random number from 1 to MAX_ROOM; 0 marks a metadata row that nobody has written."""
    return 1 + secrets.randbelow(MAX_ROOM)


def _spread(value: Any, counts: Sequence[int], field: str) -> list[tuple[Any, int]]:
    """For each sample its entry of a field, and how many samples before it have the same entry."""
    total = sum(counts)
    if not isinstance(value, list):
        return [(value, index) for index in range(total)]
    if len(value) == total:
        return [(entry, 0) for entry in value]
    if len(value) == len(counts):
        return [(entry, number) for entry, count in zip(value, counts, strict=True) for number in range(count)]
    raise bad_field(field, f"has {len(value)} entries for {total} samples of {len(counts)} prompts")


def _room_of(room: int, number: int) -> int:
    if number == 0:
        return room
    digest = hashlib.blake2b(f"{room}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % MAX_ROOM + 1


def _host(value: Any, *, required: bool) -> str:
    if value is None and not required:
        return ""
    if value is None:
        raise bad_field("bootstrap_host", "is missing: this is a decode server, send requests to a router")
    host = value[1:-1] if isinstance(value, str) and re.fullmatch(r"\[.*:.*\]", value) else value
    if not isinstance(host, str) or not is_host(host):
        raise bad_field(
            "bootstrap_host",
            f"must be the host name or address of a prefill server without a port, not {_shown(value)}",
        )
    return host


def _port(value: Any) -> int | None:
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535):
        raise bad_field("bootstrap_port", f"must be a port from 1 to 65535 or null, not {_shown(value)}")
    return value


def _check_room(value: Any) -> None:
    if value is None:
        raise bad_field(
            "bootstrap_room", "is missing: this server does half of each request, send requests to a router"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ROOM:
        raise bad_field("bootstrap_room", f"must be a whole number from 1 to {MAX_ROOM}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
