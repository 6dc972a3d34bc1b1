"""Whether a draft model can propose tokens for a model: another model with the same vocabulary. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from twostroke.config import EAGLE3, HEAD_DRAFTERS, ModelConfig, ScheduleConfig
from twostroke.errors import ConfigError
from twostroke.models.catalog.places import locate
from twostroke.models.draft_heads import refuse_head, refuse_head_as_model
from twostroke.models.known_specs import known_spec

FLAG = "--draft-model"
TOKENIZER = "tokenizer.json"


def draft_dir(name: str, dtype: str) -> Path | None:
    """Return what `places.locate` returns for a draft model. Raises ConfigError, naming its flag."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        refuse_head_as_model(FLAG, name, directory)
    try:
        return locate(name, dtype)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--model", FLAG), field=FLAG) from error


def refuse_heads(schedule: ScheduleConfig, model: ModelConfig, model_dir: Path) -> None:
    """Raises ConfigError where a head of a checkpoint is to propose: one of the model's own, or an EAGLE-3 head."""
    drafter, name = schedule.speculate, schedule.draft_model
    if drafter not in HEAD_DRAFTERS:
        return
    if drafter == EAGLE3 and name is not None:
        directory = Path(name).expanduser()
        refuse_head(drafter, name, directory if directory.is_dir() else None)
    refuse_head(drafter, model.model, model_dir)


def check_draft(name: str, draft: Path, model: Path) -> None:
    """Raises ConfigError, one line, where the draft model in a directory cannot propose tokens for `model`.

    `name` is the draft model's, as `--draft-model` says it.
    """
    if draft.resolve() == model.resolve():
        raise _refused(name, "is the model itself: a draft model is a smaller one")
    check_vocab_sizes(name, known_spec(draft).vocab_size, known_spec(model).vocab_size)
    own, others = _vocabulary(draft), _vocabulary(model)
    differing = sorted(own.items() ^ others.items(), key=lambda entry: entry[1])
    if differing:
        token, number = differing[0]
        raise _refused(
            name, f"has another vocabulary than the model: they differ in token {number} ({token!r}), among others"
        )


def check_vocab_sizes(name: str, draft_tokens: int, model_tokens: int) -> None:
    """Raises ConfigError where the two models draw from different numbers of tokens."""
    if draft_tokens != model_tokens:
        raise _refused(
            name, f"draws from {draft_tokens} tokens and the model from {model_tokens}: both need one vocabulary"
        )


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"{FLAG} {name} {why}", field=FLAG)


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return the number of each token, added ones included. Raises ConfigError where its file cannot be read."""
    path = directory / TOKENIZER
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = (read.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # of a Unigram tokenizer: pairs of a token and its score
            vocabulary = {str(token): number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{str(added["content"]): int(added["id"]) for added in read.get("added_tokens") or ()}}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error!r}", field=FLAG) from error
