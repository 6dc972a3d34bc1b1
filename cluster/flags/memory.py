"""Page memory and steps of each worker."""

from __future__ import annotations

import argparse
import re

from cluster.flags.defaults import DEFAULTS, with_default
from twostroke.config import CPU_STEP_TOKENS, DEVICE_SHARE, GPU_STEP_TOKENS, HOST_CACHE_BYTES

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def memory_bytes(text: str) -> int:
    """ "2G", "2GiB" and "2048M" are powers of 1024, "2GB" is of 1000, a bare number is bytes."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if matched is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write bytes, or for example 512M, 2G, 2GiB, 2GB")
    number, unit, suffix = matched[1], matched[2].lower(), (matched[3] or "").lower()
    base = 1000 if unit and suffix == "b" else 1024
    return int(float(number) * base ** _UNITS[unit])


def size_text(size_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def add_cache(group: argparse._ActionsContainer) -> None:
    cache = DEFAULTS.cache
    group.add_argument(
        "--block-size", type=int, default=cache.block_size, metavar="TOKENS", help=with_default("tokens per KV block")
    )
    group.add_argument(
        "--kv-cache-memory",
        type=memory_bytes,
        default=cache.kv_cache_memory_bytes,
        metavar="SIZE",
        help=f"page memory of each worker: bytes, 512M, 2G, 2GiB (default: {size_text(HOST_CACHE_BYTES)} on a CPU; "
        f"on a GPU {DEVICE_SHARE:.0%}% of its memory, weights included, over all workers)",
    )


def add_schedule(group: argparse._ActionsContainer) -> None:
    schedule = DEFAULTS.schedule
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=schedule.max_num_seqs,
        metavar="N",
        help=with_default("sequences that hold pages at once on one worker"),
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=schedule.max_num_batched_tokens,
        metavar="N",
        help=f"tokens in one step (default: {CPU_STEP_TOKENS} on CPUs, {GPU_STEP_TOKENS} on GPUs; twice --max-num-seqs "
        "where that is more)",
    )
    group.add_argument(
        "--step-target-ms",
        type=float,
        default=schedule.step_target_s * 1e3,
        metavar="MS",
        help=with_default("length of a step in which streams run: how much of prompts runs beside them"),
    )
    group.add_argument(
        "--takeover",
        action=argparse.BooleanOptionalAction,
        default=schedule.takeover,
        help=with_default("decode workers with room compute prompts that would wait at a prefill worker"),
    )
