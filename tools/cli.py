"""`twostroke COMMAND`: the commands of `cluster`, and those that measure, simulate and examine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cluster import cli
from cluster.cli import Command, Program

COMMANDS = {
    **cli.COMMANDS,
    "doctor": Command("tools.doctor.command", "send a chat twice and say why its prompt was reused, or was not"),
    "simulate": Command("tools.simulate.command", "play a trace against policies and fleets in virtual time"),
    "bill": Command("tools.bill.command", "say what a model and its pages take, before anything is started"),
    "bench": Command("tools.bench", "load a server and measure latency and throughput"),
}
PROGRAM = Program("twostroke", cli.DESCRIPTION, COMMANDS)


def main(arguments: Sequence[str] | None = None) -> int:
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
