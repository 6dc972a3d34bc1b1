"""What a draft model takes on a decode worker in addition to the model."""

from __future__ import annotations

from pathlib import Path

from tools.bill.model import BilledModel, spec_of
from tools.bill.parts import BilledPart
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.places import locate
from twostroke.models.drafts.check import (
    TOKENIZER,
    DraftModelPlan,
    check_draft,
    check_vocab_sizes,
    draft_dir,
    plan_draft,
    refuse_no_smaller,
)


def draft_part(model: BilledModel) -> BilledPart:
    draft = billed_draft(model)
    if draft is None:
        return BilledPart(name="draft", json=None)
    pages = f"{draft.pages} pages for {draft.tokens} tokens, one scratch page, generations"
    return BilledPart(
        name="draft",
        json={
            "model": draft.name,
            "weight_bytes": draft.weights.total,
            "pages": draft.pages,
            "page_bytes": draft.page_bytes,
            "pool_bytes": draft.pool_bytes,
        },
        total_bytes=draft.total_bytes,
        pool_bytes=draft.pool_bytes,
        rows=(
            ("draft weights", draft.weights.total, f"{draft.name}, {draft.weights_kind}; on decode workers"),
            ("draft pages", draft.pool_bytes, pages),
        ),
    )


def billed_draft(billed: BilledModel) -> DraftModelPlan | None:
    """Counts the draft model as a decode worker does; None where none is named.

    Raises ConfigError where it cannot propose tokens for the model, or has no room for pages.
    """
    flags, config = billed.flags, billed.config()
    name, model = flags.draft.draft_model, config.model
    if name is None:
        return None
    if flags.memory.device_memory_bytes is not None:
        raise ConfigError(
            f"--draft-model {name} is computed on CPUs only: leave --device-memory away", field="draft_model"
        )
    schedule = config.schedule.replace(draft_model=name, draft_cache_bytes=flags.draft.draft_cache_bytes)
    schedule.check_draft_model(model)
    directory = draft_dir(name, model.dtype)
    if directory is None:
        raise ConfigError(f"draft model {name!r} is not on this machine; run: twostroke model pull {name}")
    _check_vocabulary(name, directory, billed)
    plan = plan_draft(directory, model, config.cache, schedule)
    refuse_no_smaller(name, plan.weights, billed.plan.weights)
    return plan


def _check_vocabulary(name: str, draft: Path, billed: BilledModel) -> None:
    """Compares the tokenizers where both models have one, and otherwise only the number of tokens."""
    model = billed.flags.model
    path = Path(model.model).expanduser()
    directory = path if path.exists() else locate(model.model, model.dtype)
    if directory is not None and (directory / TOKENIZER).is_file() and (draft / TOKENIZER).is_file():
        check_draft(name, draft, directory)
    elif billed.spec is not None:
        check_vocab_sizes(name, spec_of(name, model.dtype, None).vocab_size, billed.spec.vocab_size)
