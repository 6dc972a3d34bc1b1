"""Plays a trace in Dynamo's own offline replay, and prints what each request came to.

It runs in a Python that has `ai-dynamo-runtime`, and knows nothing of this repository. Its argument is a JSON file.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def engine(asked: dict[str, Any], role: str) -> dict[str, Any]:
    """Returns the arguments of one role's engine."""
    return {
        "engine": {
            "worker_type": role,
            "block_size": asked["block_tokens"],
            "num_gpu_blocks": asked[f"{role}_pages"],
            "max_num_seqs": asked["max_num_seqs"],
            "max_num_batched_tokens": asked["step_tokens"],
            "timing_model": asked["timing_model"],
        }
    }


def main(path: str) -> None:
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    core = importlib.import_module("dynamo._core")
    result = core.run_mocker_trace_replay(
        [asked["trace"]],
        prefill_engine_args=engine(asked, "prefill"),
        decode_engine_args=engine(asked, "decode"),
        num_prefill_workers=asked["prefill"],
        num_decode_workers=asked["decode"],
        router_mode="kv_router",
        router_config=core.KvRouterConfig(),
        trace_block_size=asked["block_tokens"],
        capture_per_request=True,
    )
    requests = sorted(result.per_request, key=lambda each: each["arrival_time_ms"])
    answers = [
        {"ttft_s": each["ttft_ms"] / 1e3, "reused_tokens": each["reused_input_tokens"], "tokens": each["input_length"]}
        for each in requests
    ]
    Path(asked["answers"]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
