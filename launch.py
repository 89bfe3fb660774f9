"""The one entry point: `python launch.py --help`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import msgspec

from server import arguments, default_model, supervisor
from server.config import ServerConfig, StartupError


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 after a clean end, 2 for what the person at the keyboard can put right, 1 for anything else."""
    # Until the server takes signals itself: unwinding ends a download under way and removes what it left.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        config = arguments.parse(argv)
        # Before anything slow, so that a port in use is known at once.
        listener = supervisor.listen(config.host, config.port)
        return supervisor.run(_with_model_folder(config), listener)
    except StartupError as error:
        return arguments.report(error)
    except KeyboardInterrupt:
        return 130


def _with_model_folder(config: ServerConfig) -> ServerConfig:
    if config.engine.model_path != default_model.NAME:
        return config
    engine = msgspec.structs.replace(config.engine, model_path=str(default_model.ensure()))
    return msgspec.structs.replace(config, engine=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
