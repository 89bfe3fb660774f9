"""The command line: flags, their help, and one line for whatever is wrong with them.

A flag has the name of the field it sets in `ServerConfig` or `EngineConfig`, and that field's default.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from scheduler.config import EngineConfig
from server import default_model
from server.config import ServerConfig, StartupError

_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for struct in (ServerConfig, EngineConfig)
    for field in msgspec.structs.fields(struct)
    if not field.required
}
_PROGRAM = "launch.py"


def parse(argv: Sequence[str]) -> ServerConfig:
    """Settings from command-line words. StartupError for wrong ones; SystemExit(0) after --help."""
    parser = _parser()
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise StartupError(_unknown_flag(unknown[0], parser))
    given = vars(values)
    _check(given)
    fields = {
        struct: {name: given[name] for name in struct.__struct_fields__ if name in given}
        for struct in (ServerConfig, EngineConfig)
    }
    engine = EngineConfig(**fields[EngineConfig])
    # Clients of other servers send the model path they started the server with; the same works here.
    fields[ServerConfig]["served_model_name"] = given["served_model_name"] or engine.model_path
    return ServerConfig(**fields[ServerConfig], engine=engine)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        usage="python launch.py [--flag value ...]",
        description="Serves a language model over an OpenAI-compatible HTTP API.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False,
    )
    _add_model(parser.add_argument_group("model"))
    _add_http(parser.add_argument_group("HTTP server"))
    _add_device(parser.add_argument_group("device and memory"))
    _add_scheduling(parser.add_argument_group("scheduling"))
    _add_logging(parser.add_argument_group("logging and supervision"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--model-path",
        _text,
        "folder of a checkpoint (config.json, safetensors, tokenizer), or a preset that needs no files, such as "
        "tiny-qwen3-moe; the default is downloaded once",
        default=default_model.NAME,
    )
    _flag(
        group,
        "--served-model-name",
        _text,
        'the name clients put in "model"',
        default=None,
        derived="the value of --model-path",
    )
    _flag(group, "--tokenizer-path", _text, "folder of the tokenizer", derived="the model's")
    _flag(group, "--chat-template", _text, "file with a Jinja chat template", derived="the tokenizer's")
    _flag(
        group,
        "--load-format",
        ("auto", "dummy"),
        "auto reads safetensors; dummy makes random weights from config.json alone",
    )
    _flag(group, "--dtype", ("auto", "bfloat16", "float16", "float32"), "of weights and KV; auto is the checkpoint's")
    _flag(
        group,
        "--context-length",
        _whole_number(1),
        "longest prompt plus output of one request, in tokens",
        derived="the model's",
    )


def _add_http(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--host", _text, "address to listen on; 0.0.0.0 or :: for every interface")
    _flag(group, "--port", _whole_number(0, 65535), "port to listen on; 0 takes a free one and prints it")
    _flag(group, "--api-key", _text, "key that clients must send as a bearer token", derived="none is asked for")
    _flag(group, "--max-request-bytes", _whole_number(1), "longest request body")
    _flag(group, "--stream-interval", _whole_number(1), "tokens a stream collects before it sends a chunk")
    _flag(
        group,
        "--max-queued-requests",
        _whole_number(1),
        "requests that may wait for a place; more are answered with 503",
        derived="no limit",
    )


def _add_device(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--device", ("auto", "cpu", "cuda"), "auto is cuda where there is one")
    _flag(group, "--num-threads", _whole_number(1), "CPU compute threads", derived="the cores this process may use")
    _flag(group, "--mem-fraction-static", _number(0.0, 1.0), "share of GPU memory for weights and KV cache")
    _flag(
        group,
        "--max-total-tokens",
        _whole_number(1),
        "tokens the KV cache holds",
        derived="what fits in memory",
    )
    _flag(group, "--page-size", _whole_number(1), "tokens in a page of the KV cache")
    _flag(group, "--attention-backend", ("auto", "torch", "cpu", "triton"), "auto chooses by device")
    _flag(group, "--disable-cuda-graph", None, "decode without CUDA graphs")
    _flag(
        group, "--cuda-graph-max-bs", _whole_number(1), "largest decode batch with a CUDA graph", derived="from memory"
    )


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--max-running-requests",
        _whole_number(1),
        "requests decoded together",
        derived="256 on CPU, 512 on a GPU",
    )
    _flag(
        group,
        "--chunked-prefill-size",
        _chunk_size,
        "prompt tokens computed in one step; -1 never splits a prompt",
        derived="512 on CPU, 8192 on a GPU",
    )
    _flag(group, "--max-prefill-tokens", _whole_number(1), "prompt tokens admitted in one step")
    _flag(
        group,
        "--schedule-policy",
        ("fcfs", "lpm"),
        "order of waiting requests: first come first served, or longest cached prefix first",
    )
    _flag(
        group,
        "--schedule-conservativeness",
        _number(0.0, math.inf, exclusive=False),
        "above 1 holds back more memory for output still to come, below 1 less",
    )
    _flag(group, "--disable-radix-cache", None, "compute every prompt whole instead of reusing shared prefixes")
    overlap = group.add_mutually_exclusive_group()
    overlap.add_argument(
        "--disable-overlap-schedule",
        action="store_true",
        default=None,
        help="process each step's results before launching the next (default: on CPU)",
    )
    overlap.add_argument(
        "--enable-overlap-schedule",
        dest="disable_overlap_schedule",
        action="store_false",
        default=None,
        help="launch a step before the results of the one before are processed (default: on a GPU)",
    )


def _add_logging(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--log-level", ("debug", "info", "warning", "error"), "how much to log")
    _flag(group, "--log-requests", None, "log a line for each request")
    _flag(group, "--decode-log-interval", _number(0.0, math.inf), "seconds between status lines under load")
    _flag(
        group,
        "--watchdog-timeout",
        _number(0.0, math.inf),
        "seconds one forward pass may take before its process reports where it hangs and ends",
    )
    _flag(
        group,
        "--health-timeout",
        _number(0.0, math.inf),
        "seconds without an answer of the engine after which /health is 503",
    )
    _flag(
        group,
        "--shutdown-timeout",
        _number(0.0, math.inf, exclusive=False),
        "seconds that running requests get to finish after SIGTERM",
    )


def _flag(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Callable[[str], Any] | tuple[str, ...] | None,
    text: str,
    *,
    derived: str | None = None,
    default: Any = ...,
) -> None:
    """kind: a function of the word, the words allowed, or None for a switch. derived: what happens without the flag."""
    if default is ...:
        default = _DEFAULTS[name.removeprefix("--").replace("-", "_")]
    if kind is None:
        group.add_argument(name, action="store_true", default=default, help=text)
        return
    text = f"{text} (default: {derived or default})".replace("%", "%%")
    if isinstance(kind, tuple):
        group.add_argument(name, choices=kind, default=default, help=text)
    else:
        group.add_argument(name, type=kind, default=default, metavar=_metavar(kind), help=text)


def _metavar(kind: Callable[[str], Any]) -> str:
    return "TEXT" if kind is _text else "N"


def _text(word: str) -> str:
    if not word.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def _whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def convert(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {word!r}")
        return value

    return convert


def _number(low: float, high: float, *, exclusive: bool = True) -> Callable[[str], float]:
    """exclusive: `low` itself is not allowed. `high` is allowed unless it is infinite."""
    above = f"above {low:g}" if exclusive else f"of at least {low:g}"
    wanted = f"a number {above}" + ("" if math.isinf(high) else f" and at most {high:g}")

    def convert(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (low < value if exclusive else low <= value) or value > high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {word!r}")
        return value

    return convert


def _chunk_size(word: str) -> int:
    if word == "-1":
        return -1
    try:
        return _whole_number(1)(word)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, or -1 for no limit, not {word!r}") from None


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
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"unknown flag {flag}: " + (f"did you mean {close[0]}?" if close else "see --help for those there are")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(message.removeprefix("argument "))


def report(error: StartupError) -> int:
    """Prints the one line and gives the exit status."""
    print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
    return 2
