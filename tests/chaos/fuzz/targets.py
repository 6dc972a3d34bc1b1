"""All parsers and ports."""

from __future__ import annotations

from tests.chaos.fuzz.parsers import PARSERS
from tests.chaos.fuzz.servers import SERVERS

TARGETS = [*PARSERS, *SERVERS]
