"""The HTTP door's listening socket."""

from __future__ import annotations

import asyncio
import socket

from router.addresses import bind_listener


async def test_connections_send_every_token_at_once_without_nagles_delay() -> None:
    delays_off = asyncio.get_running_loop().create_future()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        delays_off.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind_listener("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(delays_off, 60)
        writer.close()
        await writer.wait_closed()
