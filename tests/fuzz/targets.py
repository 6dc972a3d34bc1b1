"""All doors."""

from __future__ import annotations

from tests.fuzz.doors import DOORS
from tests.fuzz.servers import SERVERS

TARGETS = [*DOORS, *SERVERS]
