"""The table of what features add to a bill: one line for each, in the order of the bill's JSON."""

from __future__ import annotations

from collections.abc import Callable

from tools.bill.drafts import draft_part
from tools.bill.model import BilledModel
from tools.bill.parts import BilledPart
from tools.bill.ranks import ranks_part

PARTS: tuple[Callable[[BilledModel], BilledPart], ...] = (ranks_part, draft_part)
"""Each raises ConfigError where a worker would be refused."""
