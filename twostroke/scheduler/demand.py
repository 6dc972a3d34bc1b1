"""A demand says in numbers what a sequence needs of the next step. Its constraints make it."""

from __future__ import annotations

from typing import NamedTuple


class Demand(NamedTuple):
    """It is a tuple because one is made for every running sequence in every step."""

    start: int
    """Position of the first token that runs."""
    most: int
    """Tokens that could run at once: all known ones from `start` on."""
    least: int = 0
    """Tokens that run at once at least, however little the token budget leaves."""
    weight: int = 1
    """Tokens of the budget that each of its tokens takes."""
    logits: int = 0
    """Logits that each of its tokens needs, besides those behind the last known one."""
    ends_on_blocks: bool = True
    """A chunk that ends early is cut back to a block boundary, where the worker aligns chunks."""
    is_stream: bool = False
    """It runs beside streams as one of them: the budget for prompts does not count it."""
