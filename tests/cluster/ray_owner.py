"""Somebody else's Ray cluster: prints its address, answers each line with the names of all actors."""

from __future__ import annotations

import sys
import tempfile

import ray


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        ray.init(
            address="local",
            num_cpus=0,
            object_store_memory=80_000_000,
            include_dashboard=False,
            log_to_driver=False,
            labels={"role": "decode"},
            _temp_dir=folder,
        )
        print(ray.get_runtime_context().gcs_address, flush=True)
        for _ in sys.stdin:
            names = sorted(entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True))
            print(",".join(names), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
