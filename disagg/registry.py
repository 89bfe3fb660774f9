"""The KV managers by name; one line a backend."""

from __future__ import annotations

from typing import Protocol

from disagg.base import KVArgs, KVManager, Role, TransferOptions
from disagg.fake import FakeKVManager
from disagg.mooncake import MooncakeKVManager
from disagg.nixl import NixlKVManager
from disagg.tcp import TcpKVManager


class KVManagerFactory(Protocol):
    """ValueError for settings or memory that the backend cannot serve, OSError where it cannot start.

    bootstrap_addr: host:port where a prefill rank registers. incarnation: see `TransferManager`.
    """

    def __call__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
    ) -> KVManager: ...


KV_MANAGERS: dict[str, KVManagerFactory] = {
    "fake": FakeKVManager,
    "tcp": TcpKVManager,
    "mooncake": MooncakeKVManager,
    "nixl": NixlKVManager,
}


def kv_manager_class(backend: str) -> KVManagerFactory:
    if backend not in KV_MANAGERS:
        raise ValueError(f"--disaggregation-transfer-backend must be one of {', '.join(KV_MANAGERS)}, got {backend!r}")
    return KV_MANAGERS[backend]
