"""The command line as settings, and one line for whatever is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scheduler.config import MAX_RANKS_PER_NODE, EngineConfig
from server.config import ParentLink, ServerConfig, StartupError
from server.flags import MODES, PROGRAM, make_parser
from server.local_config import LocalConfig
from server.router_config import PrefillAddress, RouterConfig, server_url


def parse(argv: Sequence[str]) -> ServerConfig | RouterConfig | LocalConfig:
    """Settings from command-line words. StartupError for wrong ones; SystemExit(0) after --help."""
    parser = make_parser()
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise StartupError(_unknown_flag(unknown[0], parser))
    given = vars(values)
    named = _named(argv, parser)
    mode = _mode(given["disaggregation_mode"], named)
    _check_mode(mode, named, given)
    _check(given)
    if mode == "router":
        return _router(given)
    server = _server(given | {"disaggregation_mode": "null" if mode == "local" else mode})
    if mode == "local":
        counts = {name: given[name] for name in ("num_prefill", "num_decode")}
        _check_local_size(server.engine, sum(counts.values()))
        return LocalConfig(servers=server, router=_router(given | {"prefill": [], "decode": []}), **counts)
    return server


def _check_local_size(engine: EngineConfig, num_servers: int) -> None:
    count = num_servers * engine.ranks_per_node
    if count > MAX_RANKS_PER_NODE:
        raise StartupError(
            f"--num-prefill and --num-decode make {num_servers} servers with {count} ranks on this host, over "
            f"{MAX_RANKS_PER_NODE}: lower them"
        )


def _server(given: dict[str, Any]) -> ServerConfig:
    engine = EngineConfig(**_fields(EngineConfig, given))
    try:
        engine.moe_options()  # checks the layout too
    except ValueError as error:
        raise StartupError(str(error)) from error
    # Clients of other servers send the model path they started the server with; the same works here.
    name = given["served_model_name"] or engine.model_path
    return ServerConfig(**_fields(ServerConfig, given | {"served_model_name": name}), engine=engine)


def _router(given: dict[str, Any]) -> RouterConfig:
    fields = _fields(RouterConfig, given)
    fields["prefill"] = tuple(_prefill_addresses(given["prefill"]))
    fields["decode"] = tuple(server_url(word, "--decode") for word in given["decode"])
    if fields["max_queued_requests"] is None:
        del fields["max_queued_requests"]
    return RouterConfig(**fields)


def _fields(struct: type[msgspec.Struct], given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in struct.__struct_fields__ if name in given}


def num_replicas(argv: Sequence[str]) -> int:
    """How many engines the command line asks for, which share nothing; whether the rest is right shows in `parse`."""
    given, _ = make_parser().parse_known_args(argv)
    return 1 if given.enable_dp_attention else int(given.dp_size)


def words(config: ServerConfig | RouterConfig) -> list[str]:
    """A command line that `parse` turns into this config."""
    if isinstance(config, RouterConfig):
        result = ["--disaggregation-mode=router"]
        for address in config.prefill:
            result += [
                "--prefill",
                address.url,
                *([] if address.bootstrap_port is None else [str(address.bootstrap_port)]),
            ]
        result += [word for url in config.decode for word in ("--decode", url)]
        return result + _changed(config, ("prefill", "decode"))
    return [*_changed(config, ("engine",)), *_changed(config.engine, ("log_level", "log_requests"))]


def _changed(config: ServerConfig | RouterConfig | EngineConfig, left_out: tuple[str, ...]) -> list[str]:
    """Flags of the fields that do not have their default."""
    result = []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if field.name in left_out or (not field.required and value == field.default):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name == "disable_overlap_schedule":
            result.append(flag if value else "--enable-overlap-schedule")
        elif value is True:
            result.append(flag)
        elif isinstance(value, ParentLink):
            result.append(f"{flag}={msgspec.json.encode(value).decode()}")
        else:
            result.append(f"{flag}={value}")
    return result


def _prefill_addresses(given: list[str]) -> list[PrefillAddress]:
    """URLs, each with the port of its bootstrap server behind it where that was given."""
    addresses: list[PrefillAddress] = []
    for word in given:
        if not word.isdecimal():
            addresses.append(PrefillAddress(server_url(word, "--prefill")))
        elif not addresses or addresses[-1].bootstrap_port is not None:
            raise StartupError(f"--prefill {word}: a bootstrap port stands behind the URL of its server")
        elif not 1 <= int(word) <= 65535:
            raise StartupError(f"--prefill {addresses[-1].url} {word}: the bootstrap port must be from 1 to 65535")
        else:
            addresses[-1] = PrefillAddress(addresses[-1].url, int(word))
    return addresses


# Flags that mean something in some modes only; those of the engine and the model mean nothing to a router.
_MODES_OF: dict[str, tuple[str, ...]] = (
    dict.fromkeys(EngineConfig.__struct_fields__, ("null", "prefill", "decode", "local"))
    | dict.fromkeys(
        ("served_model_name", "tokenizer_path", "chat_template", "stream_interval"),
        ("null", "prefill", "decode", "local"),
    )
    | dict.fromkeys(
        (
            "disaggregation_transfer_backend",
            "disaggregation_num_connections",
            "disaggregation_checksum",
            "disaggregation_bootstrap_timeout",
            "disaggregation_waiting_timeout",
            "disaggregation_heartbeat_interval",
            "disaggregation_heartbeat_failures",
            "disaggregation_ib_device",
        ),
        ("prefill", "decode", "local"),
    )
    | dict.fromkeys(("disaggregation_bootstrap_port", "disaggregation_kv_host"), ("prefill", "decode"))
    | dict.fromkeys(("disaggregation_decode_enable_radix_cache", "num_reserved_decode_tokens"), ("decode", "local"))
    | dict.fromkeys(RouterConfig.__struct_fields__, ("router", "local"))
    | dict.fromkeys(("prefill", "decode"), ("router",))
    | dict.fromkeys(("num_prefill", "num_decode"), ("local",))
    | dict.fromkeys(
        (
            "disaggregation_mode",
            "max_queued_requests",
            *(set(RouterConfig.__struct_fields__) & set(ServerConfig.__struct_fields__)),
        ),
        MODES,
    )
)


def _named(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flags that stand on the command line, by field."""
    actions = parser._option_string_actions
    flags = [word.split("=", 1)[0] for word in argv]
    return {actions[flag].dest: flag for flag in flags if flag in actions}


def _mode(word: str, named: dict[str, str]) -> str:
    if "disaggregation_mode" not in named and "disaggregation_transfer_backend" in named:
        return "local"
    return word


def _check_mode(mode: str, named: dict[str, str], given: dict[str, Any]) -> None:
    for field, flag in named.items():
        modes = _MODES_OF.get(field, MODES)
        if mode not in modes:
            wanted = " or ".join(filter(None, (", ".join(modes[:-1]), modes[-1])))
            raise StartupError(f"{flag} is for --disaggregation-mode {wanted}, and the mode is {mode}: leave one out")
    if mode == "local" and given["nnodes"] > 1:
        raise StartupError(
            f"--nnodes {given['nnodes']} is for one server: start routers and local mode without it, and a prefill or "
            "decode server on several hosts with --disaggregation-mode"
        )
    if mode == "router":
        for role in ("prefill", "decode"):
            if not given[role]:
                raise StartupError(f"--disaggregation-mode router needs --{role} URL of at least one {role} server")
    method = given["load_balance_method"]
    if mode == "prefill" and method not in ("auto", "follow_bootstrap_room"):
        raise StartupError(
            f"--load-balance-method {method} is not for prefill servers: decode servers look for a request at the rank "
            "that its room leads to; leave it out"
        )
    if mode == "decode" and given["disaggregation_bootstrap_port"] == 0:
        raise StartupError(
            "--disaggregation-bootstrap-port 0 is for a prefill server: name the port that prefill servers listen on"
        )


def _check(given: dict[str, Any]) -> None:
    """What no flag can tell by itself."""
    page, total = given["page_size"], given["max_total_tokens"]
    if total is not None and total < page:
        raise StartupError(
            f"--max-total-tokens {total} is less than one page of --page-size {page} tokens: raise it to {page}"
        )
    if given["device"] == "cpu" and given["attention_backend"] == "triton":
        raise StartupError("--attention-backend triton needs a GPU: leave it out, or use --device cuda")
    template = given["chat_template"]
    if template is not None and not Path(template).is_file():
        raise StartupError(f"--chat-template {template}: there is no such file")
    tokenizer = given["tokenizer_path"]
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise StartupError(f"--tokenizer-path {tokenizer}: there is no such folder")


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    flag = word.split("=", 1)[0]
    if not flag.startswith("-"):
        return f"unexpected word {word!r}: every setting is a --flag, see --help"
    begun = [name for name in parser._option_string_actions if name.startswith(flag)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"unknown flag {flag}: " + (f"did you mean {close[0]}?" if close else "see --help for those there are")


def report(error: StartupError) -> int:
    """Prints the one line and gives the exit status."""
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return 2
