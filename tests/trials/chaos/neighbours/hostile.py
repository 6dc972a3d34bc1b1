"""Hostile clients as a process of their own, one after the other.

The first line of standard input is the target. Each line after it names an entry, its seconds and a seed; when the
entry has ended, a line of JSON says what it did. The entry `BUSY` asks nothing: it uses its share of a core.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import traceback

from tests.trials.chaos.neighbours.entries import ENTRIES
from tests.trials.chaos.neighbours.target import BROKEN_OFF, Play, Target
from twostroke.base.json_values import from_json

BUSY = "busy elsewhere"


async def _burn(play: Play) -> None:
    async def attempt() -> None:
        sum(range(20_000))

    await play.repeat(attempt)


async def play_entry(name: str, seconds: float, seed: int, target: Target) -> dict[str, object]:
    """What it did. A mistake in the entry itself is told, not raised: the others go on."""
    play, mistake = Play(target, seconds, seed), ""
    run = _burn if name == BUSY else ENTRIES[name].run
    try:
        async with asyncio.timeout(seconds + 20):
            await run(play)
    except BROKEN_OFF:
        pass
    except Exception:
        mistake = traceback.format_exc()[-1500:]
    return {"sent": play.sent, "cpu_s": round(play.cpu_s, 2), "mistake": mistake}


def main() -> int:
    logging.getLogger().addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    target = from_json(Target, sys.stdin.readline())
    print("ready", flush=True)
    for line in sys.stdin:
        name, seconds, seed = json.loads(line)
        print(json.dumps(asyncio.run(play_entry(name, seconds, seed, target))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
