"""`python -m tests.cluster.puller ADDRESS EPOCH FINGERPRINT`: pulls a prompt's pages, says so, and holds them."""

from __future__ import annotations

import asyncio
import sys

from tests.unit.worker.callers import Puller
from tests.unit.worker.rig import BLOCK, prompt_of
from twostroke.worker.host import ReadyInfo


async def main() -> None:
    puller = Puller(ReadyInfo("prefill-0", "prefill", *sys.argv[1:4], "", 0))
    await puller.pages(puller.pull(prompt_of(8 * BLOCK)), 8)
    print("pulled", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
