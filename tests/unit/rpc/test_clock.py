"""How far clocks of two hosts are apart, and how wrong that may be."""

from __future__ import annotations

import random

from twostroke.rpc.clock import offset_of


def test_the_true_offset_lies_within_the_error_whatever_the_network_does() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        true_ns = draw.randrange(-(10**15), 10**15)
        sent_ns = 10**16 + draw.randrange(10**9)
        read_ns = sent_ns + draw.randrange(10**7)
        received_ns = read_ns + draw.randrange(10**7)
        found = offset_of(sent_ns, read_ns - true_ns, received_ns)
        assert abs(found.offset_ns - true_ns) <= found.error_ns <= (received_ns - sent_ns) // 2 + 1
