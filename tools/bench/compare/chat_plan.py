"""Plans the requests of parallel chats as segments."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bench.compare.scenario import Chats
from tools.bench.load import PlannedRequest, Segment, Stream


def chat_plan(chats: Chats, due_s: Sequence[float | None]) -> list[PlannedRequest]:
    """Returns the turns of all chats: every chat's first one of `chats.turns`, then every chat's next one."""
    numbers = [(turn, chat) for turn in chats.turns for chat in range(chats.count)]
    return [
        PlannedRequest(index, _history(chats, chat, turn), chats.answer_tokens, due)
        for index, ((turn, chat), due) in enumerate(zip(numbers, due_s, strict=True))
    ]


def _history(chats: Chats, chat: int, turn: int) -> tuple[Segment, ...]:
    """Returns the system prompt, what was said in each turn, and the answers to all but the last."""
    system = Segment(Stream.PREFIX, chat % chats.system_prompts, chats.system_tokens)
    said: list[Segment] = []
    for earlier in range(turn + 1):
        number = 2 * (earlier * chats.count + chat)
        said.append(Segment(Stream.OWN, number, chats.user_tokens))
        if earlier < turn:
            said.append(Segment(Stream.OWN, number + 1, chats.answer_tokens))
    return (system, *said)
