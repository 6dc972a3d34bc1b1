"""The draft model of a cluster, which decode workers load besides the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twostroke.config import ClusterConfig, WorkerConfig
from twostroke.kv_cache.pool_size import refuse_more_than_free
from twostroke.models.checks.preflight import check_model
from twostroke.models.drafts.check import CACHE_FLAG, check_draft, check_draft_size, draft_dir, naming_draft, plan_draft


class ClusterDraftModel:
    """The draft model as a `cluster.branches.FurtherModel`. Nothing happens where the config names none."""

    def with_absolute_path(self, config: ClusterConfig) -> ClusterConfig:
        name = config.schedule.draft_model
        if name is None or not Path(name).exists():
            return config
        return config.replace(schedule=config.schedule.replace(draft_model=str(Path(name).resolve())))

    def fetch_and_check(self, config: ClusterConfig, model_dir: Path, fetch: Callable[[str, str], Path]) -> None:
        name, model = config.schedule.draft_model, config.model
        if name is None:
            return
        with naming_draft(name):
            draft = draft_dir(name, model.dtype) or fetch(name, model.dtype)
            alone = model.replace(model=name, served_model_name=None, max_model_len=None)
            check_model(draft, alone.replace(tp=1, prefill_tp=None, decode_tp=None))  # one process computes all of it
        check_draft(name, draft, model_dir)
        check_draft_size(name, draft, model_dir, model)
        plan_draft(draft, model, config.cache, config.schedule)

    def check_memory(self, config: ClusterConfig, free_bytes: int) -> None:
        schedule = config.schedule
        if schedule.draft_model is not None:
            refuse_more_than_free(schedule.draft_cache_bytes, free_bytes, workers=config.decode, flag=CACHE_FLAG)

    def loaded_by(self, config: WorkerConfig) -> list[str]:
        draft = config.schedule.draft_model
        return [draft] if draft is not None and config.can_sample else []
