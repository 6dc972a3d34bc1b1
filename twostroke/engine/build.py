"""From a worker's config to what computes its steps: page memory, runner, and the facts that the rest must know."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twostroke.config import PACED_PREFIX, Role, WorkerConfig
from twostroke.engine.cores import Cores
from twostroke.engine.paced_runner import PacedRunner, PacedSpec
from twostroke.errors import ConfigError
from twostroke.kv_cache.block import HASH_SCHEME
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.schedule.batch import Runner

LAYOUT = "page:layer,kv,head,token,dim"
"""Order of dimensions in a page's bytes; part of the fingerprint."""

MIN_PAGES = 2
"""A sequence that crosses a block's end holds two pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    """What clients call it."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    page_bytes: int
    pages: int
    fingerprint: str
    """Workers whose fingerprints differ hold different KV and never exchange pages."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    model: LoadedModel
    memory: Pages
    runner: Runner

    def close(self) -> None:
        """For a runner that is not on an engine thread; else close that thread, then `memory`."""
        self.runner.close()
        self.memory.close()


def build_runner(config: WorkerConfig, model_dir: Path | None) -> BuiltEngine:
    """Claim the page memory and load the model. `model_dir` is None for a paced model alone.

    Raises ConfigError or UnsupportedModel before anything is started.
    """
    if config.model.is_paced:
        return _build_paced(config)
    assert model_dir is not None, "a real model needs its directory"
    return _build_model(config, model_dir)


def _build_model(config: WorkerConfig, model_dir: Path) -> BuiltEngine:
    # These load torch and transformers: 300 MB and seconds that a fleet of paced workers does without.
    from twostroke.engine.runner import ModelRunner
    from twostroke.models.registry import read_spec

    model = config.model
    spec = read_spec(model_dir, model.max_model_len)
    facts = _facts(
        config,
        model=Path(model.model).name,
        page_bytes=spec.page_bytes(config.cache.block_size, model.dtype),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        model_reach=spec.max_position_embeddings,
        revision=f"{_weights_hash(model_dir)};tokenizer={_file_hash(model_dir / 'tokenizer.json')}",
    )

    def load(memory: PageMemory) -> Runner:
        cores = Cores.claim(config.threads, pin=config.pin, borrow=config.borrow)
        try:
            return ModelRunner(
                model_dir,
                spec,
                memory,
                config.model,
                block_size=facts.block_size,
                cores=cores,
                with_head=config.role is Role.DECODE,
            )
        except BaseException:
            cores.close()
            raise

    return _with_memory(facts, load)


def _build_paced(config: WorkerConfig) -> BuiltEngine:
    spec = PacedSpec.parse(config.model.model.removeprefix(PACED_PREFIX))
    block_size = config.cache.block_size
    facts = _facts(
        config,
        model="paced",
        page_bytes=spec.page_bytes_for(block_size),
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_token_ids,
        model_reach=spec.max_model_len,
        revision=f"vocab-{spec.vocab}-page-{spec.page_bytes_for(block_size)};tokenizer=bytes",
    )
    return _with_memory(facts, lambda memory: PacedRunner(spec, memory, block_size=block_size))


def _facts(
    config: WorkerConfig,
    *,
    model: str,
    page_bytes: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    model_reach: int,
    revision: str,
) -> LoadedModel:
    wanted = config.model.max_model_len
    if wanted is not None and wanted > model_reach:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {model_reach} tokens that the model was made for",
            field="max_model_len",
        )
    pages = config.cache.kv_cache_memory_bytes // page_bytes
    if pages < MIN_PAGES:
        raise ConfigError(
            f"--kv-cache-memory {config.cache.kv_cache_memory_bytes} holds {pages} pages of {page_bytes} bytes; "
            f"at least {MIN_PAGES} are needed",
            field="kv_cache_memory",
        )
    block_size, dtype = config.cache.block_size, config.model.dtype
    fingerprint = (
        f"model={model};revision={revision};block_size={block_size};hash={HASH_SCHEME};kv_dtype={dtype};"
        f"weights={config.model.weights};layout={LAYOUT}"
    )
    return LoadedModel(
        name=config.model.public_name,
        max_model_len=wanted or model_reach,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        block_size=block_size,
        page_bytes=page_bytes,
        pages=pages,
        fingerprint=fingerprint,
    )


def _with_memory(facts: LoadedModel, make_runner: Callable[[PageMemory], Runner]) -> BuiltEngine:
    memory = PageMemory(facts.pages, facts.page_bytes)
    try:
        return BuiltEngine(facts, memory, make_runner(memory))
    except BaseException:
        memory.close()
        raise


def _weights_hash(directory: Path) -> str:
    """Of config.json and every weight file's header and size: what a revision changes, without reading gigabytes."""
    hasher = hashlib.blake2b(_config_identity(directory / "config.json"), digest_size=6)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            hasher.update(f"{path.name} {path.stat().st_size}".encode())
            hasher.update(file.read(header_bytes))
            hasher.update(file.read(4096))
    return hasher.hexdigest()


def _config_identity(path: Path) -> bytes:
    """The config without the traces of whoever saved it last."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for trace in ("_name_or_path", "transformers_version"):
        config.pop(trace, None)
    return json.dumps(config, sort_keys=True).encode()


def _file_hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest() if path.exists() else "none"
