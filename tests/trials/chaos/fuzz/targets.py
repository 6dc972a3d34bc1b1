"""All parsers and ports."""

from __future__ import annotations

from tests.trials.chaos.fuzz.parsers import PARSERS
from tests.trials.chaos.fuzz.servers import SERVERS

TARGETS = [*PARSERS, *SERVERS]
