"""The flags of `twostroke bill`: which model, how much memory, which requests, and what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.flags.checks import field_of
from tools.bill.requests.chains import Answers
from tools.output import ReportFiles
from twostroke.base.errors import ConfigError
from twostroke.config import PACED_PREFIX, CacheConfig, ModelConfig, RuntimeConfig, ScheduleConfig
from twostroke.config.cache import HOST_CACHE_BYTES, check_exact_layers, form_name, size_text
from twostroke.config.schedule import check_draft_cache
from twostroke.config.settings import Settings, group, setting, setting_of

MOST_TOKENS = 10**8
"""A longer request is a mistake."""


class ModelFlags(Settings):
    model: str = setting_of(
        ModelConfig,
        "model",
        help="a name of the catalogue, a directory with a config.json, a GGUF file, a hub id, paced:SPEC",
    )
    dtype: str = setting_of(ModelConfig, "dtype", help="number format of the weights")
    weights: str = setting_of(ModelConfig, "weights")
    max_model_len: int | None = setting_of(ModelConfig, "max_model_len")
    max_num_seqs: int = setting_of(ScheduleConfig, "max_num_seqs")
    tp: int = setting_of(ModelConfig, "tp")
    prefill_tp: int | None = setting_of(ModelConfig, "prefill_tp")
    decode_tp: int | None = setting_of(ModelConfig, "decode_tp")

    def model_post_init(self, _context: Any) -> None:
        if self.weights == "int8" and self.dtype != "bfloat16":
            raise ConfigError(f"--weights int8 needs --dtype bfloat16, got {self.dtype}", field="weights")
        _ = self.config

    @property
    def config(self) -> ModelConfig:
        """The config of a worker, as far as the bill knows it. Raises ConfigError for what no worker can have."""
        given = {name: getattr(self, name) for name in ("model", "dtype", "weights", "tp", "prefill_tp", "decode_tp")}
        return ModelConfig(**given)

    @property
    def is_paced(self) -> bool:
        return self.model.startswith(PACED_PREFIX)


class MemoryFlags(Settings):
    block_size: int = setting_of(CacheConfig, "block_size")
    kv_format: str | None = setting_of(
        CacheConfig, "kv_format", help="form of the pages; all are billed, this one in detail"
    )
    kv_exact_layers: int = setting_of(CacheConfig, "kv_exact_layers")
    kv_cache_memory_bytes: int | None = setting_of(
        CacheConfig,
        "kv_cache_memory_bytes",
        default_text=f"{size_text(HOST_CACHE_BYTES)}; with --device-memory what weights leave of it",
    )
    device_memory_bytes: int | None = setting(
        None,
        flag="--device-memory",
        least=1,
        is_size=True,
        unit="SIZE",
        help="bill a GPU with so much memory instead of a CPU",
    )
    host_cache_bytes: int = setting_of(CacheConfig, "host_cache_bytes")
    disk_cache_bytes: int = setting_of(CacheConfig, "disk_cache_bytes")


class RequestFlags(Settings):
    length: str | None = setting(
        None,
        unit="TOKENS[,TOKENS]",
        help="lengths of requests, prompt and answer together",
        default_text="a half, a quarter ... of the longest; those of the log",
    )
    shared: int = setting(0, least=0, most=MOST_TOKENS, unit="TOKENS", help="first tokens that all requests share")
    log: str | None = setting(None, unit="FILE", help="lengths and hit rates of a log of `serve --request-log`")
    trace: str | None = setting(None, unit="FILE", help="the same from a trace: Mooncake's JSON lines, Azure's CSV")
    limit: int | None = setting(None, least=1, help="only the first N requests")
    answers: str = setting(
        Answers.LOGGED.value,
        choices=tuple(Answers),
        help="pages of answers: not kept (a prefill worker), kept and not found again, found by prompts that continue "
        "from them, or found as the log shows",
    )

    def model_post_init(self, _context: Any) -> None:
        if self.log is not None and self.trace is not None:
            raise ConfigError("--log and --trace exclude each other", field="trace")
        _ = self.lengths

    @property
    def file(self) -> Path | None:
        name = self.log if self.log is not None else self.trace
        return None if name is None else Path(name)

    @property
    def file_flag(self) -> str:
        return "--log" if self.log is not None else "--trace"

    @property
    def lengths(self) -> tuple[int, ...]:
        return whole_numbers("--length", self.length)


class MachineFlags(Settings):
    bandwidth: float | None = setting(
        None, above=0, unit="GB/S", help="memory that a step reads per second", default_text="as measured here"
    )
    measure: bool = setting(
        False, help="measure this machine: reading memory, computing pages, copying them, and --disk-cache-dir"
    )
    threads: int = setting_of(RuntimeConfig, "threads", help="compute threads of a worker, for --measure")
    disk_cache_dir: str | None = setting_of(
        CacheConfig, "disk_cache_dir", help="folder whose disk --measure writes and reads", default_text=None
    )

    def model_post_init(self, _context: Any) -> None:
        if self.disk_cache_dir is None:
            return
        if not self.measure:
            raise ConfigError("--disk-cache-dir would be ignored: it is for --measure", field="disk_cache_dir")
        if not Path(self.disk_cache_dir).is_dir():
            raise ConfigError(f"--disk-cache-dir {self.disk_cache_dir}: no such folder", field="disk_cache_dir")


class DraftFlags(Settings):
    draft_model: str | None = setting_of(ScheduleConfig, "draft_model")
    draft_cache_bytes: int = setting_of(ScheduleConfig, "draft_cache_bytes")

    def model_post_init(self, _context: Any) -> None:
        check_draft_cache(self.draft_model, self.draft_cache_bytes)


class BillFlags(Settings):
    model: ModelFlags = group(ModelFlags, "model")
    memory: MemoryFlags = group(MemoryFlags, "memory")
    draft: DraftFlags = group(DraftFlags, "draft model")
    requests: RequestFlags = group(RequestFlags, "requests")
    machine: MachineFlags = group(MachineFlags, "machine", "this machine")
    output: ReportFiles = group(ReportFiles, "output")

    def model_post_init(self, _context: Any) -> None:
        if self.machine.measure and self.memory.device_memory_bytes is not None:
            raise ConfigError(
                "--measure measures this machine's CPU, and --device-memory bills a GPU: leave one of them away",
                field="measure",
            )
        for flag, ranks in self.model.config.ranks_by_flag:
            if self.memory.device_memory_bytes is not None:
                raise ConfigError(f"{flag} {ranks} is billed on CPUs only: leave --device-memory away", field=flag)
            if self.machine.measure:
                raise ConfigError(f"{flag} {ranks}: --measure measures workers of one rank", field=flag)
        if self.model.weights == "int8" and self.memory.device_memory_bytes is not None:
            raise ConfigError("--weights int8 is for CPUs: leave --device-memory away", field="weights")
        check_exact_layers(self.memory.kv_exact_layers, self._number_format)

    @property
    def form(self) -> str:
        """The form of the pages that is billed in detail."""
        return form_name(self._number_format, self.memory.kv_exact_layers, self.model.dtype)

    @property
    def _number_format(self) -> str:
        return self.memory.kv_format or self.model.dtype


def whole_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """Returns the token counts of a list with commas; none by default."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:12]) <= MOST_TOKENS for part in parts):
        raise ConfigError(
            f"{flag} must be whole numbers from 1 to {MOST_TOKENS} with commas between them, got {text!r}",
            field=field_of(flag),
        )
    return tuple(dict.fromkeys(int(part) for part in parts))
