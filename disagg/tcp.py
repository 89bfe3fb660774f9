"""The built-in KV manager: bulk bytes over TCP, over unix sockets where both ranks share a host."""

from __future__ import annotations

from disagg.base import KVArgs, Role, TransferOptions
from disagg.tcp_decode import DecodeEnd, TcpKVReceiver
from disagg.tcp_prefill import PrefillEnd, TcpKVSender


class TcpKVManager:
    """One rank's end. A prefill rank registers at `bootstrap_addr` (host:port); raises if it cannot.

    `incarnation` must be the same for all ranks of one prefill server and new at each start.
    """

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
    ) -> None:
        if kv_args.device != "cpu":
            raise ValueError(f"the tcp backend moves host memory only, kv_args.device is {kv_args.device!r}")
        self.kv_args = kv_args
        self.role = role
        options = options or TransferOptions()
        self._end: PrefillEnd | DecodeEnd
        if role == "prefill":
            self._end = PrefillEnd(kv_args, options, bootstrap_addr, incarnation)
        else:
            self._end = DecodeEnd(kv_args, options)
        self.wake_fd = self._end.wake.fd

    def create_sender(self, room: int) -> TcpKVSender:
        if not isinstance(self._end, PrefillEnd):
            raise TypeError("a decode rank has no senders")
        return TcpKVSender(self._end, room)

    def create_receiver(self, room: int, bootstrap_addr: str) -> TcpKVReceiver:
        if not isinstance(self._end, DecodeEnd):
            raise TypeError("a prefill rank has no receivers")
        return TcpKVReceiver(self._end, room, bootstrap_addr)

    def num_rooms(self) -> int:
        return len(self._end.rooms)

    def close(self) -> None:
        self._end.close()
