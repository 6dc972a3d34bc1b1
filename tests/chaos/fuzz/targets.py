"""All doors."""

from __future__ import annotations

from tests.chaos.fuzz.parsers import DOORS
from tests.chaos.fuzz.servers import SERVERS

TARGETS = [*DOORS, *SERVERS]
