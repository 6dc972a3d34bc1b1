"""How far clocks of two hosts are apart, and how wrong that may be."""

from __future__ import annotations

import random

import pytest

from tests.unit.worker.rig import TOKEN, decode
from twostroke.rpc import clock
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.clock import ClockOffset, introduced, offset_of


def test_the_true_offset_lies_within_the_error_whatever_the_network_does() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        true_ns = draw.randrange(-(10**15), 10**15)
        sent_ns = 10**16 + draw.randrange(10**9)
        read_ns = sent_ns + draw.randrange(10**7)
        received_ns = read_ns + draw.randrange(10**7)
        found = offset_of(sent_ns, read_ns - true_ns, received_ns)
        assert abs(found.offset_ns - true_ns) <= found.error_ns <= (received_ns - sent_ns) // 2 + 1


async def test_a_worker_of_this_machine_has_this_clock_and_that_of_another_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with decode() as worker:
        channel = PeerChannel(worker.info.address, TOKEN)
        try:
            info, offset = await introduced(channel)
            assert (info.server_id, offset) == ("decode-0", ClockOffset(0, 0))
            monkeypatch.setattr(clock, "machine_name", lambda: "another machine")
            _, measured = await introduced(channel)
            assert measured.error_ns > 0
            assert abs(measured.offset_ns) <= measured.error_ns, "it is the same clock after all"
        finally:
            await channel.close()
