"""The one entry point: `python launch.py --help`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends without their tracebacks

import msgspec

from server import (
    arguments,
    default_model,
    listening,
    local_mode,
    node,
    parent_link,
    router_process,
    supervisor,
    torchrun,
    transfer_package,
)
from server.config import ServerConfig, StartupError
from server.local_config import LocalConfig
from server.router_config import RouterConfig


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 after a clean end, 2 for what the person at the keyboard can put right, 1 for anything else."""
    launch = torchrun.detect()
    if launch is None:
        return _run(argv, None)
    if launch.local_rank > 0:
        return torchrun.wait_for_first(launch)
    with torchrun.First(launch) as first:
        first.status = _run(argv, launch)
    return first.status


def _run(argv: Sequence[str], launch: torchrun.Launch | None) -> int:
    # Until the server takes signals itself: unwinding ends a download under way and removes what it left.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Ports are taken before anything slow, so that one in use is known at once.
        if launch is None:
            settings = arguments.parse(argv)
        else:
            settings = arguments.parse([*torchrun.words(launch, arguments.num_replicas(argv)), *argv])
            torchrun.check(settings, launch)
        match settings:
            case LocalConfig() as config:
                transfer_package.check(config.servers.engine)
                listener = listening.listen(config.router.host, config.router.port)
                servers = _with_model_folder(config.servers)
                return local_mode.run(msgspec.structs.replace(config, servers=servers), listener)
            case RouterConfig() as config:
                return _run_router(config)
            case ServerConfig() as config:
                return _run_server(config)
    except StartupError as error:
        return arguments.report(error)
    except KeyboardInterrupt:
        return 130


def _run_server(config: ServerConfig) -> int:
    link = config.parent_link
    transfer_package.check(config.engine)
    listening.check_kv_host(config)
    meeting = listening.meet(config)
    if meeting is not None and config.engine.node_rank > 0:
        listener = listening.listen(config.host, config.port)
        return node.run(_with_model_folder(config), listener, meeting)
    if link is None:
        listener, bootstrap = listening.listen(config.host, config.port), listening.listen_bootstrap(config, meeting)
    else:
        parent_link.attach(link)
        listener = parent_link.listener(link.listener)
        bootstrap = parent_link.listener(link.bootstrap_listener) if link.bootstrap_listener >= 0 else None
    try:
        return supervisor.run(_with_model_folder(config), listener, bootstrap, meeting)
    except StartupError as error:
        with parent_link.refusing(link) as is_first:
            if is_first:
                arguments.report(error)
        return 2


def _run_router(config: RouterConfig) -> int:
    link = config.parent_link
    if link is None:
        return router_process.run(config, listening.listen(config.host, config.port))
    parent_link.attach(link)
    return router_process.run(config, parent_link.listener(link.listener))


def _with_model_folder(config: ServerConfig) -> ServerConfig:
    if config.engine.model_path != default_model.NAME:
        return config
    engine = msgspec.structs.replace(config.engine, model_path=str(default_model.ensure()))
    return msgspec.structs.replace(config, engine=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
