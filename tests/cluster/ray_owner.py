"""Somebody else's Ray cluster: prints its address, answers each line.

"actors"           the names of all of them
"places"           NAME@NODE of each that lives
"nodes"            the ids of those that live
"node ROLE"        one more node, labelled for that role; its id
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ray

RAY = str(Path(sys.executable).with_name("ray"))


def actors() -> str:
    return ",".join(sorted(entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)))


def places() -> str:
    living = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
    return ",".join(sorted(f"{actor['Name']}@{actor['Address']['NodeID']}" for actor in living))


def nodes() -> list[str]:
    return sorted(record["NodeID"] for record in ray.nodes() if record["Alive"])


@contextlib.contextmanager
def node(address: str, role: str) -> Iterator[str]:
    before = set(nodes())
    size = ["--num-cpus", "0", "--object-store-memory", "80000000"]
    start = [RAY, "start", "--address", address, *size, "--labels", f"role={role}", "--block"]
    with subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not (joined := set(nodes()) - before):
                time.sleep(0.05)
            yield joined.pop()
        finally:
            process.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r") as folder, contextlib.ExitStack() as stack:
        ray.init(
            address="local",
            num_cpus=0,
            object_store_memory=80_000_000,
            include_dashboard=False,
            log_to_driver=False,
            labels={"role": "prefill"},
            _temp_dir=folder,
        )
        stack.callback(ray.shutdown)
        address = ray.get_runtime_context().gcs_address
        print(address, flush=True)
        for line in sys.stdin:
            match line.split():
                case ["places"]:
                    print(places(), flush=True)
                case ["nodes"]:
                    print(",".join(nodes()), flush=True)
                case ["node", role]:
                    print(stack.enter_context(node(address, role)), flush=True)
                case _:
                    print(actors(), flush=True)


if __name__ == "__main__":
    main()
