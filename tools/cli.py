"""`twostroke COMMAND`: the commands of `cluster`, and those that talk, measure, simulate and examine.

The latter need packages that no server needs, the extra `tools`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cluster import commands
from cluster.cli import DESCRIPTION, Program
from cluster.commands import Command

COMMANDS = {
    **commands.COMMANDS,
    "chat": Command("tools.chat.command", "talk to a running server"),
    "doctor": Command("tools.doctor.command", "send a chat twice and say why its prompt was reused, or was not"),
    "simulate": Command("tools.simulate.command", "play a trace against policies and fleets in virtual time"),
    "bill": Command("tools.bill.command", "say what a model and its pages take, before anything is started"),
    "bench": Command("tools.bench", "load a server and measure latency and throughput"),
}
PACKAGES = frozenset({"aiohttp", "matplotlib", "prompt_toolkit"})
"""The import names of the extra's packages."""
PROGRAM = Program("twostroke", DESCRIPTION, COMMANDS, extra="tools", packages=PACKAGES)


def main(arguments: Sequence[str] | None = None) -> int:
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
