"""Page memory of each worker, and sizes as people write them."""

from __future__ import annotations

import re

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting
from twostroke.page_forms.table import PAGE_FORMS

MIN_PAGES = 2
"""Least pages of any worker: a sequence that crosses a block's end holds two."""
HOST_CACHE_BYTES = 1 << 30
"""Page memory of a worker that computes on the CPU, where --kv-cache-memory is not given."""
DEVICE_SHARE = 0.9
"""Share of a CUDA device's memory for weights, pages and working memory of all its workers."""

MOST_BYTES = 1 << 63
"""Limit that sizes in bytes do not reach, so that they fit into the numbers of messages and files."""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def memory_bytes(text: str) -> int:
    """Returns bytes. "2G", "2GiB" and "2048M" are powers of 1024, "2GB" is of 1000, a bare number is bytes. Raises
    ValueError.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if matched is None:
        raise ValueError(f"not a size: {text!r}; write bytes, or for example 512M, 2G, 2GiB, 2GB")
    number, unit, suffix = matched[1], matched[2].lower(), (matched[3] or "").lower()
    base = 1000 if unit and suffix == "b" else 1024
    size = float(number) * base ** _UNITS[unit]
    if size >= MOST_BYTES:
        raise ValueError(f"a size must be less than 8 EiB, got {text.strip()[:40]!r}")
    return int(size)


def size_text(size_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


KV_FORMATS = tuple(form.name for form in PAGE_FORMS)
"""Forms of pages that workers compute with; `twostroke/page_forms` says what each stores."""
WITH_EXACT_LAYERS = tuple(form.name for form in PAGE_FORMS if form.may_have_exact_layers)
"""The forms that --kv-exact-layers is for."""


def form_name(kv_format: str, exact_layers: int, dtype: str, processes: int = 1) -> str:
    """Returns the name of the pages' form.

    `int4+2xbfloat16` keeps the first two and last two layers in bfloat16, `bfloat16/4` is of workers of four processes.
    """
    name = f"{kv_format}+{exact_layers}x{dtype}" if exact_layers and kv_format in WITH_EXACT_LAYERS else kv_format
    return name if processes == 1 else f"{name}/{processes}"


def check_exact_layers(exact_layers: int, *kv_formats: str) -> None:
    """Raises ConfigError where layers should be exact and no page has a form that is for."""
    if exact_layers and not set(WITH_EXACT_LAYERS) & set(kv_formats):
        raise ConfigError(
            f"--kv-exact-layers {exact_layers} is for --kv-format {' or '.join(WITH_EXACT_LAYERS)}, "
            f"and pages hold {kv_formats[0]}",
            field="kv_exact_layers",
        )


class CacheConfig(Settings):
    block_size: int = setting(
        16, least=1, most=256, power_of_two=True, unit="TOKENS", help="tokens per KV block; all workers agree on it"
    )
    kv_format: str | None = setting(
        None,
        choices=KV_FORMATS,
        help="number format of the KV in pages; fp8 and int8 have a scale per token and head and half the bytes, int4 "
        "scales per channel or group and a third of them",
        default_text="as --dtype",
    )
    prefill_kv_format: str | None = setting(
        None,
        choices=KV_FORMATS,
        help="--kv-format of prefill workers; where decode workers have another, their pages are converted on the way",
        default_text="as --kv-format",
    )
    decode_kv_format: str | None = setting(
        None, choices=KV_FORMATS, help="--kv-format of decode workers", default_text="as --kv-format"
    )
    kv_exact_layers: int = setting(
        0,
        least=0,
        zero="none",
        unit="LAYERS",
        help="as many first and as many last layers whose KV int4 pages keep in the number format of --dtype",
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        flag="--kv-cache-memory",
        least=1,
        is_size=True,
        unit="SIZE",
        help="page memory of each worker: bytes, 512M, 2G, 2GiB",
        default_text=f"{size_text(HOST_CACHE_BYTES)} on a CPU; on a GPU {DEVICE_SHARE:.0%} of its memory, weights "
        "included, over all workers",
    )
    kv_window_share: float | None = setting(
        None,
        above=0,
        most=1,
        unit="SHARE",
        help="pages for layers with a window of attention, for each page of the others; less suits longer requests",
        default_text="what requests of four windows need",
    )
    host_cache_bytes: int = setting(
        0,
        flag="--host-cache",
        least=0,
        zero="none",
        is_size=True,
        unit="SIZE",
        help="host memory of each worker for pages that leave its page memory",
    )
    disk_cache_bytes: int = setting(
        0,
        flag="--disk-cache",
        least=0,
        zero="none",
        is_size=True,
        unit="SIZE",
        help="disk space of each worker for pages; they survive restarts",
    )
    disk_cache_dir: str | None = setting(
        None,
        is_path=True,
        unit="FOLDER",
        help="folder of pages on disk; the workers of a host share it",
        default_text="pages in the folder of cached models",
    )
    disk_write_mb_s: float = setting(
        100.0,
        flag="--disk-write-mb-s",
        above=0,
        unit="MB/S",
        help="megabytes that each worker may write to disk in a second, over time",
    )
    device_share: float = setting(
        DEVICE_SHARE,
        is_hidden=True,
        above=0,
        most=1,
        help="share of a CUDA device's memory for all that one worker keeps there; workers of one device share it out",
    )

    pin_cap: float = setting(
        0.25, least=0, most=0.9, unit="SHARE", help="share of each worker's pages that pins may keep"
    )
    pin_tenant_cap: float = setting(
        0.1,
        least=0,
        most=0.9,
        unit="SHARE",
        help="share of them that the cache hints of one tenant's requests may keep",
    )

    @property
    def host_bytes(self) -> int:
        """Page memory of a worker that computes on the CPU."""
        return self.kv_cache_memory_bytes or HOST_CACHE_BYTES
