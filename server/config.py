"""Everything a start of the server is given, in one frozen value: one kind for each way to start."""

from __future__ import annotations

import msgspec

from scheduler.config import EngineConfig

BOOTSTRAP_PORT = 8998


class ParentLink(msgspec.Struct, frozen=True):
    """What a server gets from the parent that started it as one of a group.

    name: what log lines call it. parent_pid: it ends with this process.
    listener, bootstrap_listener: descriptors of listening sockets, -1 for none. status: of a pipe, which is written a
        `ChildReady` in JSON once requests can be taken. refusals: see `scheduler.config.refusing`.
    """

    name: str
    parent_pid: int
    listener: int
    status: int
    bootstrap_listener: int = -1
    refusals: int = -1


class ChildReady(msgspec.Struct, frozen=True):
    """What a server of a group says of itself. All but the first are zero for a router."""

    url: str
    dtype: str = ""
    device: str = ""
    max_total_tokens: int = 0
    can_chat: bool = False


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the API process; the engine's are in `engine`. One field a command-line flag of the same name.

    served_model_name: the name clients put in "model"; always set (taken from the model path when no flag gave one).
    host, port: where to listen; port 0 lets the system choose, and the ready line prints the choice.
    api_key: clients must send `Authorization: Bearer <key>`; None lets everybody in.
    tokenizer_path: folder of a tokenizer; None takes the model's (a byte-level one where the model has none).
    chat_template: file with a Jinja chat template; None takes the tokenizer's.
    stream_interval: tokens a stream collects before it sends a chunk; 1 sends each token at once.
    max_request_bytes: longest HTTP body that is read; longer ones are answered with 413.
    request_read_timeout: seconds in which the headers of a request have to come, and then its body has to come to its
        end, or to grow by 1024 bytes for each of them (it then has as long again); slower ones are answered with 408.
    client_timeout: seconds after which a client counts as gone whose machine does not answer any more.
    health_timeout: seconds without an answer of a rank after which /health is 503.
    shutdown_timeout: seconds that running requests get after SIGTERM.
    disaggregation_bootstrap_port: of a prefill server, where its bootstrap server listens (0 lets the system choose);
        of a decode server, the one it asks when a request names none.
    disaggregation_kv_host: address at which other servers reach this one's ranks; None takes `host`, and where that
        is every interface the address of the default route.
    parent_link: set for the servers that local mode starts.
    log_level: "debug", "info", "warning" or "error".
    """

    engine: EngineConfig
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    stream_interval: int = 1
    max_request_bytes: int = 64 * 1024 * 1024
    request_read_timeout: float = 30.0
    client_timeout: float = 60.0
    health_timeout: float = 10.0
    shutdown_timeout: float = 30.0
    disaggregation_bootstrap_port: int = BOOTSTRAP_PORT
    disaggregation_kv_host: str | None = None
    parent_link: ParentLink | None = None
    log_level: str = "info"
    log_requests: bool = False

    @property
    def outputs_are_meaningful(self) -> bool:
        """False where KV comes from nowhere: a prefill or decode server with the `fake` backend.

        And where experts are chosen without the router, for benchmarks.
        """
        engine = self.engine
        if engine.ep_dispatch_algorithm == "fake":
            return False
        return engine.disaggregation_mode == "null" or engine.disaggregation_transfer_backend != "fake"


class StartupError(Exception):
    """Something the person at the keyboard can put right: one line that says what to do, and exit status 2."""
