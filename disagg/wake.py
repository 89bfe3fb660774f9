"""How a KV manager wakes the loop that polls its rooms, so that nothing polls in vain."""

from __future__ import annotations

import os
import threading


class Wake:
    """An eventfd. notify() makes `fd` readable and does nothing once the wake is closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def notify(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """The number may be given to another file at once, so nobody may write to it afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
