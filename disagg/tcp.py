"""The built-in KV manager: bulk bytes over TCP, and shorter ways where both ranks share a host."""

from __future__ import annotations

from disagg.base import KVArgs, Role, TransferOptions
from disagg.manager import TransferManager
from disagg.tcp_decode import TcpDecode
from disagg.tcp_prefill import TcpPrefill


class TcpKVManager(TransferManager):
    """One rank's end, see TransferManager, for host memory or that of one CUDA device."""

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
    ) -> None:
        if kv_args.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"the tcp backend moves host and CUDA memory, kv_args.device is {kv_args.device!r}")
        if kv_args.device != "cpu":
            from disagg.tcp_device import prepare  # loads PyTorch and Triton, which host memory does without

            prepare(kv_args.device)
        super().__init__(kv_args, role, options, bootstrap_addr, incarnation, "tcp", TcpPrefill, TcpDecode)
