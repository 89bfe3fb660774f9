"""One format for every line of the API process; ranks use the same with their own name."""

from __future__ import annotations

import logging
import sys


def configure(level: str) -> None:
    """Sends the root logger to standard error. level: "debug", "info", "warning" or "error"."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s api: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # Requests are logged by --log-requests, and start and stop by the supervisor.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
