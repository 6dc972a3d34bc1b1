"""What clients of the matrix do with their streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from router.addresses import Addresses
from tests.trials.chaos.faults.answer import Piece
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.load import Ask, Conduct, Endpoint

ROUTERS = (Addresses("a:1", "a:2", "a:3", "a:1"), Addresses("b:1", "b:2", "b:3", "b:1"))


async def test_who_moves_holds_on_to_the_old_stream_until_the_next_router_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    async def pieces(self: Clients, ask: Ask, router: Addresses, token: str, is_whole: bool) -> AsyncIterator[Piece]:
        name = router.http[0]
        said.append(f"{name} is asked from {token or 'the beginning'}")
        try:
            for number in range(3):
                said.append(f"{name} speaks")
                yield Piece(index=0, tokens=(number,), resume_token=f"{name}{number}")
        finally:
            said.append(f"{name} is let go")

    monkeypatch.setattr(Clients, "_pieces", pieces)
    clients = Clients(routers=ROUTERS, model="m", patience_s=1.0)
    ask = Ask(name="moves", endpoint=Endpoint.GRPC, prompt="p", max_tokens=6, conduct=Conduct.MOVES)
    transcript = await clients.follow(ask, 0)
    assert transcript.turns == ["it wanted to"]
    assert said[:6] == [
        "a is asked from the beginning", "a speaks", "a speaks", "b is asked from a1", "b speaks", "a is let go",
    ]  # fmt: skip
    assert said[-1] == "b is let go"
