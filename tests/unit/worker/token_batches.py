"""What the batches of one token stream say, as entries: columns name requests by numbers that earlier entries gave."""

from __future__ import annotations

from twostroke.rpc.v1.worker_pb2 import Token, TokenBatch, TokenEntry


class TokenBatches:
    """The batches of one connection, in their order."""

    def __init__(self) -> None:
        self._numbered: dict[int, TokenEntry] = {}

    def entries(self, batch: TokenBatch) -> list[TokenEntry]:
        for entry in batch.entries:
            if entry.number:
                self._numbered[entry.number] = entry
        columns = zip(batch.numbers, batch.positions, batch.tokens, strict=True)
        return [*batch.entries, *(self._entry(*column) for column in columns)]

    def _entry(self, number: int, position: int, token: int) -> TokenEntry:
        known = self._numbered[number]
        return TokenEntry(
            request_id=known.request_id, attempt=known.attempt, position=position, tokens=[Token(id=token)]
        )
