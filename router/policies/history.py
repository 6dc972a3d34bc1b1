"""What a router sent where: all that policies know that do not listen to workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from twostroke.ids import BlockName, WorkerId


class History:
    """Per worker, the blocks of the latest requests that were sent there; least recently sent are forgotten."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self._most_blocks = most_blocks
        self._sent: dict[WorkerId, OrderedDict[BlockName, None]] = {}

    def matched(self, worker: WorkerId, names: Sequence[BlockName]) -> int:
        """How many of the first blocks were sent there."""
        sent = self._sent.get(worker)
        if not sent:
            return 0
        return next((depth for depth, name in enumerate(names) if name not in sent), len(names))

    def size(self, worker: WorkerId) -> int:
        return len(self._sent.get(worker, ()))

    def send(self, worker: WorkerId, names: Sequence[BlockName]) -> None:
        sent = self._sent.setdefault(worker, OrderedDict())
        for name in reversed(names):  # leaves are forgotten before what they grew from
            sent[name] = None
            sent.move_to_end(name)
        while self._most_blocks is not None and len(sent) > self._most_blocks:
            sent.popitem(last=False)
