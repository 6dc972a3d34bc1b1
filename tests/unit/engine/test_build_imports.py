"""What a worker process loads before it knows its model."""

from __future__ import annotations

import subprocess
import sys

LOADS_NO_TORCH = """
import sys
import decode_worker.worker, prefill_worker.worker
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.build import build_runner
config = WorkerConfig(role=Role.DECODE, worker_id="decode-0", model=ModelConfig(model="paced:"),
                      cache=CacheConfig(kv_cache_memory_bytes=1 << 20))
build_runner(config, None).close()
print(sorted({"torch", "transformers", "ray", "triton"} & set(sys.modules)))
"""


def test_a_paced_worker_never_loads_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS_NO_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
