"""The flags of the command line, their help, and what a value of each may be.

A flag has the name of the field it sets in `ServerConfig`, `EngineConfig` or `RouterConfig`, and that field's default.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from scheduler.config import LOAD_BALANCE_METHODS, EngineConfig
from server import default_model
from server.config import ParentLink, ServerConfig, StartupError
from server.local_config import LocalConfig
from server.router_config import POLICIES, RouterConfig

# The later struct's default is the one that --help shows where two have a field of one name.
_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for struct in (RouterConfig, ServerConfig, EngineConfig, LocalConfig)
    for field in msgspec.structs.fields(struct)
    if not field.required
}
_DEFAULTS_OF_ROUTER = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
PROGRAM = "launch.py"
MODES = ("null", "prefill", "decode", "router", "local")
BACKENDS = ("fake", "tcp", "mooncake", "nixl")
# What int32 holds, as places in the KV cache are; and less than the milliseconds that timers count in int32.
_MOST = 2**31 - 1
_MOST_SECONDS = 1e6
# Buffers are sized by the machine, so that its administrator may want to say how large they can be.
MEGA_MOE_VARIABLE = "LOCKSTEP_MEGA_MOE_MAX_TOKENS_PER_RANK"


def make_parser() -> argparse.ArgumentParser:
    """StartupError for whatever a flag can tell by itself."""
    parser = _Parser(
        prog=PROGRAM,
        usage="python launch.py [--flag value ...]",
        description="Serves a language model over an OpenAI-compatible HTTP API.\n"
        "With --disaggregation-transfer-backend NAME, prefill and decode run as servers of their own behind a router.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False,
    )
    _add_model(parser.add_argument_group("model"))
    _add_http(parser.add_argument_group("HTTP server"))
    _add_device(parser.add_argument_group("device and memory"))
    _add_parallelism(parser.add_argument_group("parallelism"))
    _add_scheduling(parser.add_argument_group("scheduling"))
    _add_disaggregation(parser.add_argument_group("prefill/decode disaggregation"))
    _add_router(parser.add_argument_group("router"))
    _add_logging(parser.add_argument_group("logging and supervision"))
    parser.add_argument("--parent-link", type=_parent_link, help=argparse.SUPPRESS)
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--model-path",
        _text,
        "folder of a checkpoint (config.json, safetensors, tokenizer), or a preset that needs no files, such as "
        "tiny-qwen3-moe; the default is downloaded once",
        default=default_model.NAME,
        aliases=("--model",),
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
        "--quantization",
        ("fp8",),
        "fp8 keeps the routed experts of a block-fp8 checkpoint in float8, in half the memory; on GPUs decode "
        "steps are faster and prompts of thousands of tokens slower, on CPUs all is slow",
        derived="all weights get --dtype when they are loaded",
    )
    _flag(
        group,
        "--context-length",
        _whole_number(2),
        "longest prompt plus output of one request, in tokens",
        derived="the model's",
    )


def _add_http(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--host", _text, "address to listen on; 0.0.0.0 or :: for every interface")
    _flag(group, "--port", _whole_number(0, 65535), "port to listen on; 0 takes a free one and prints it")
    _flag(group, "--api-key", _text, "key that clients must send as a bearer token", derived="none is asked for")
    _flag(group, "--max-request-bytes", _whole_number(1), "longest request body")
    _flag(
        group,
        "--request-read-timeout",
        _seconds(),
        "seconds in which the headers of a request have to come, and then its body has to end, or to grow by "
        "1024 bytes for each of them; 408 after that",
    )
    _flag(
        group,
        "--client-timeout",
        _number(1.0, 86400.0, exclusive=False),
        "seconds after which a client counts as gone whose machine does not answer any more",
    )
    _flag(group, "--stream-interval", _whole_number(1), "tokens a stream collects before it sends a chunk")
    _flag(
        group,
        "--max-queued-requests",
        _whole_number(1),
        "requests that may wait for a place; more are answered with 503",
        derived=f"no limit; {_DEFAULTS_OF_ROUTER['max_queued_requests']} in a router",
    )


def _add_device(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--device", ("auto", "cpu", "cuda"), "auto is cuda where there is one")
    _flag(group, "--base-gpu-id", _whole_number(0), "GPU of the first rank; the others have those behind it")
    _flag(
        group,
        "--num-threads",
        _whole_number(1, 1024),
        "CPU compute threads of each rank",
        derived="the cores this process may use, shared out",
    )
    _flag(group, "--mem-fraction-static", _number(0.0, 1.0), "share of GPU memory for weights and KV cache")
    _flag(
        group,
        "--max-total-tokens",
        _whole_number(2),
        "tokens the KV cache holds",
        derived="what fits in memory",
    )
    _flag(group, "--page-size", _whole_number(1), "tokens in a page of the KV cache")
    _flag(group, "--attention-backend", ("auto", "torch", "cpu", "triton"), "auto chooses by device")
    _flag(group, "--disable-cuda-graph", None, "decode without CUDA graphs, or on a CPU recorded passes")
    _flag(
        group,
        "--cuda-graph-max-bs",
        _whole_number(1),
        "largest decode batch with a CUDA graph or recorded pass, of each data-parallel group",
        derived="256, or --max-running-requests where that is less",
    )


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--tp-size",
        _whole_number(1),
        "ranks that share one model, each with a part of every layer and a process and device of its own",
        aliases=("--tensor-parallel-size", "--tp"),
    )
    _flag(
        group,
        "--dp-size",
        _whole_number(1),
        "with --enable-dp-attention, groups of these ranks with requests and KV of their own, which share the experts; "
        "without, replicas of all --tp-size ranks",
        aliases=("--data-parallel-size", "--dp"),
    )
    _flag(group, "--enable-dp-attention", None, "split the ranks into --dp-size groups")
    _flag(
        group,
        "--ep-size",
        _whole_number(1),
        "ranks that the routed experts are spread over; the columns of each are split over tp-size / ep-size ranks",
        derived="the value of --tp-size: every rank has whole experts",
        aliases=("--expert-parallel-size", "--ep"),
    )
    _flag(
        group,
        "--moe-dense-tp-size",
        _whole_number(1),
        "ranks that split a dense MLP: 1 keeps it whole on each",
        derived="tp-size / dp-size",
    )
    _add_experts(group)
    _flag(group, "--enable-dp-lm-head", None, "the LM head works on each group's own rows, as it always does here")
    _flag(
        group,
        "--load-balance-method",
        LOAD_BALANCE_METHODS,
        "how one of --dp-size groups or replicas is chosen for a request; auto is round_robin, and on a prefill server "
        "follow_bootstrap_room",
    )
    _flag(group, "--nnodes", _whole_number(1), "hosts that the ranks of all replicas are spread over evenly")
    _flag(group, "--node-rank", _whole_number(0), "which of the hosts this is; node 0 answers requests")
    _flag(
        group,
        "--dist-init-addr",
        _text,
        "HOST:PORT of node 0 where the hosts meet; give every host the same",
        derived="a free port of this host, on one node",
    )
    _flag(
        group,
        "--dist-timeout",
        _seconds(),
        "seconds that ranks wait for each other, at the start and in each exchange",
    )


def _add_experts(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--moe-a2a-backend",
        ("none", "deepep", "megamoe"),
        "how rows reach the ranks with their experts: none gives all rows to all ranks, deepep sends each row to the "
        "owners of its experts, megamoe does the same in one fused call",
        derived="none",
    )
    _flag(
        group,
        "--deepep-mode",
        ("auto", "normal", "low_latency"),
        "normal exchanges row counts first, low_latency sends fixed shapes, auto takes the second for decode steps",
    )
    _flag(
        group,
        "--deepep-max-tokens-per-rank",
        _whole_number(1),
        "most rows a rank may send in the low-latency layout",
    )
    _flag(
        group,
        "--deepep-transport",
        ("auto", "collective", "library"),
        "what carries rows: auto is peers' memory between GPUs of one host and collectives elsewhere, library the "
        "DeepEP library",
    )
    _flag(
        group,
        "--mega-moe-max-tokens-per-rank",
        _whole_number(1),
        f"most rows a rank may have in a step with megamoe; {MEGA_MOE_VARIABLE} in the environment sets it too",
        default=os.environ.get(MEGA_MOE_VARIABLE),
        derived="the most that the scheduler can make",
    )
    _flag(
        group,
        "--mega-moe-kernel",
        ("triton", "deep_gemm"),
        "megamoe on GPUs: our own kernels, or those of the package sgl-deep-gemm, which make the weights float8",
    )
    _flag(
        group,
        "--ep-dispatch-algorithm",
        ("static", "dynamic", "fake"),
        "which copy of an expert a row goes to: static the rank's own or a fixed one, dynamic each in turn; fake "
        "ignores the router and spreads rows evenly, for benchmarks only",
        derived="dynamic with backend none, otherwise static",
    )
    _flag(
        group,
        "--ep-num-redundant-experts",
        _whole_number(0),
        "physical experts beyond the model's own, which hold further copies of some",
    )
    _flag(group, "--enable-eplb", None, "move experts between ranks now and then so that all have even work")
    _flag(
        group,
        "--eplb-rebalance-num-iterations",
        _whole_number(1),
        "forward passes between two rebalancings",
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
        _number(0.0, 1000.0, exclusive=False),
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


def _add_disaggregation(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "--disaggregation-mode",
        MODES,
        "null computes prompts and output in one process; prefill and decode each do their part of every request; "
        "router joins them; local starts all three on this machine",
        derived="null, or local when a transfer backend is named",
    )
    _flag(
        group,
        "--disaggregation-transfer-backend",
        BACKENDS,
        "how KV moves from prefill to decode; fake moves nothing, so that its outputs are not meaningful",
    )
    _flag(group, "--num-prefill", _whole_number(1), "prefill servers that local mode starts")
    _flag(group, "--num-decode", _whole_number(1), "decode servers that local mode starts")
    _flag(
        group,
        "--disaggregation-bootstrap-port",
        _whole_number(0, 65535),
        "port where a prefill server lets decode servers find its ranks, 0 for a free one; a decode server asks at "
        "this port when a request names none",
    )
    _flag(
        group,
        "--disaggregation-kv-host",
        _text,
        "address at which other servers reach the ranks of this one",
        derived="--host; where that is every interface the address of the default route, with --nnodes that of the "
        "route to --dist-init-addr",
    )
    _flag(
        group, "--disaggregation-num-connections", _whole_number(1), "connections between a prefill and a decode rank"
    )
    _flag(group, "--disaggregation-checksum", None, "compare checksums of all transferred bytes")
    _flag(
        group,
        "--disaggregation-bootstrap-timeout",
        _seconds(),
        "seconds until a request fails for which the other side is not there",
    )
    _flag(
        group,
        "--disaggregation-waiting-timeout",
        _seconds(),
        "seconds until a request fails that has not reached the prefill server, or whose bytes do not move",
    )
    _flag(
        group,
        "--disaggregation-heartbeat-interval",
        _seconds(),
        "seconds between two signs of life of connected ranks",
    )
    _flag(
        group,
        "--disaggregation-heartbeat-failures",
        _whole_number(1),
        "missing signs of life in a row after which a rank counts as dead",
    )
    _flag(
        group,
        "--disaggregation-ib-device",
        _text,
        "RDMA devices of the mooncake backend, separated by commas",
        derived="TCP",
    )
    _flag(
        group,
        "--disaggregation-decode-enable-radix-cache",
        None,
        "decode servers keep prefixes and are sent only what they lack",
    )
    _flag(
        group,
        "--num-reserved-decode-tokens",
        _whole_number(0),
        "KV tokens a decode server keeps free for each running request before it takes another",
    )


def _add_router(group: argparse._ArgumentGroup) -> None:
    for role, names, text in (
        ("prefill", ("URL", "BOOTSTRAP_PORT"), "a prefill server and the port of its bootstrap server"),
        ("decode", ("URL", "URL"), "decode servers"),
    ):
        group.add_argument(
            f"--{role}",
            nargs="+",
            action="extend",
            default=[],
            metavar=names,
            help=f"{text}; may be repeated (default: none)",
        )
    _flag(group, "--policy", POLICIES, "how the server for a request is chosen")
    _flag(
        group,
        "--max-prefill-requests",
        _whole_number(1),
        "requests at one prefill server at a time; more wait in the router",
    )
    _flag(group, "--max-decode-requests", _whole_number(1), "the same for a decode server")
    _flag(group, "--queue-timeout", _seconds(), "seconds a request may wait in the router; 503 after that")
    _flag(group, "--request-timeout", _seconds(), "seconds a request may take altogether")
    _flag(group, "--connect-timeout", _seconds(), "seconds to open a connection to a server")
    _flag(
        group,
        "--retries",
        _whole_number(0),
        "further attempts of a request that failed before anything was sent to its client",
    )
    _flag(group, "--health-interval", _seconds(), "seconds between two health checks of a server")
    _flag(
        group,
        "--health-failures",
        _whole_number(1),
        "checks in a row without an answer after which a server is given up",
    )


def _add_logging(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--log-level", ("debug", "info", "warning", "error"), "how much to log")
    _flag(group, "--log-requests", None, "log a line for each request")
    _flag(group, "--decode-log-interval", _seconds(), "seconds between status lines under load")
    _flag(
        group,
        "--watchdog-timeout",
        _seconds(),
        "seconds one forward pass may take before its process reports where it hangs and ends",
    )
    _flag(
        group,
        "--health-timeout",
        _seconds(),
        "seconds without an answer of the engine after which /health is 503",
    )
    _flag(
        group,
        "--shutdown-timeout",
        _seconds(exclusive=False),
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
    aliases: tuple[str, ...] = (),
) -> None:
    """kind: a function of the word, the words allowed, or None for a switch. derived: what happens without the flag.

    aliases: other names that users of SGLang or vLLM may give.
    """
    if default is ...:
        default = _DEFAULTS[name.removeprefix("--").replace("-", "_")]
    if kind is None:
        group.add_argument(name, action="store_true", default=default, help=text)
        return
    text = f"{text} (default: {derived or default})".replace("%", "%%")
    if isinstance(kind, tuple):
        group.add_argument(name, *aliases, choices=kind, default=default, help=text)
    else:
        group.add_argument(name, *aliases, type=kind, default=default, metavar=_metavar(kind), help=text)


def _metavar(kind: Callable[[str], Any]) -> str:
    return "TEXT" if kind is _text else "N"


def _text(word: str) -> str:
    if not word.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, not {word!r}") from None
    return word


def _whole_number(low: int, high: int = _MOST) -> Callable[[str], int]:
    def convert(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            wanted = f"of at least {low}" if value < low and high == _MOST else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, not {word!r}")
        return value

    return convert


def _number(low: float, high: float, *, exclusive: bool = True) -> Callable[[str], float]:
    """exclusive: `low` itself is not allowed; `high` is."""
    wanted = f"a number {'above' if exclusive else 'of at least'} {low:g} and at most {high:.15g}"

    def convert(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not ((low < value if exclusive else low <= value) and value <= high):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {word!r}")
        return value

    return convert


def _seconds(*, exclusive: bool = True) -> Callable[[str], float]:
    return _number(0.0, _MOST_SECONDS, exclusive=exclusive)


def _chunk_size(word: str) -> int:
    if word == "-1":
        return -1
    try:
        return _whole_number(1)(word)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; -1 is for no limit") from None


def _parent_link(word: str) -> ParentLink:
    try:
        return msgspec.json.decode(word, type=ParentLink)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"is set by local mode alone, not by hand ({error})") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse names a flag with all its aliases, "--tp-size/--tp".
        raise StartupError(re.sub(r"^argument (--[\w-]+)[^ ]*:", r"\1:", message))
