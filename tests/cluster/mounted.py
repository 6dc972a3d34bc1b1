"""A mounted worker as a process without Ray: WorkerConfig as the first line of stdin, calls as JSON lines after it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys

from cluster.supervisor.actors import MountedWorker
from cluster.values.desired_state import Checkpoint
from twostroke.base.errors import ServeError
from twostroke.config import Role, WorkerConfig

OVERTAKEN_S = 0.02
"""The time in which calls that were begun later overtake one: Ray keeps no order among them."""


async def main() -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    worker = MountedWorker(WorkerConfig.from_json((await reader.readline()).decode()))
    calls: set[asyncio.Task[None]] = set()

    async def carry_out(number: int, name: str, arguments: list[object]) -> None:
        try:
            said = await _call(worker, name, arguments)
            answer = {"number": number, "result": dataclasses.asdict(said) if dataclasses.is_dataclass(said) else said}  # type: ignore[arg-type]  # no class
        except ServeError as error:
            answer = {"number": number, "error": type(error).__name__, "message": error.message}
        print(json.dumps(answer), flush=True)

    while line := await reader.readline():
        call = json.loads(line)
        task = asyncio.create_task(carry_out(call["number"], call["name"], call["arguments"]))
        calls.add(task)
        task.add_done_callback(calls.discard)
    os._exit(0)  # whoever began this process is gone


async def _call(worker: MountedWorker, name: str, arguments: list[object]) -> object:
    if name == "place":
        return {"pid": os.getpid(), "node_id": "node", "log_path": ""}
    if name == "run":
        await asyncio.sleep(OVERTAKEN_S)
        checkpoint = Checkpoint(str(arguments[2]), int(str(arguments[3])))
        return await worker.run(int(str(arguments[0])), Role(arguments[1]), checkpoint)
    if name == "ready":
        return await worker.ready(int(str(arguments[0])))
    if name == "release":
        return await worker.release()
    return await worker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
