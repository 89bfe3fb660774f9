"""One format for every line of the API process; ranks use the same with their own name."""

from __future__ import annotations

import logging
import sys


def configure(level: str, name: str = "api") -> None:
    """Sends the root logger to standard error. level: "debug", "info", "warning" or "error". name: of this process."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # Requests are logged by --log-requests, and start and stop by the supervisor.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
