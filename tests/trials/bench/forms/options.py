"""The flags of `tests.trials.bench forms`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.flags.checks import file_can_be_made, positive
from twostroke.base.errors import ConfigError
from twostroke.config import DEFAULT_MODEL, ModelConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.kv_cache.form import page_form

TEXT = Path(__file__).parents[4] / "docs" / "tour.md"
PREDICTION, CONVERTED, GREEDY, FACTS = PARTS = ("prediction", "converted", "greedy", "facts")
MOST_FACTS: Final = 24
"""Facts have names of their own, of which there are so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    models: tuple[ModelConfig, ...]
    forms: tuple[str, ...]
    """Without the model's own dtype, which is what they are compared with."""
    parts: frozenset[str]
    text: Path
    windows: int
    window_tokens: int
    prompts: int
    prompt_tokens: int
    continued_tokens: int
    facts: int
    context: int
    """Most tokens of the text with facts, question and answer included; the model's longest, where that is less."""
    seed: int
    threads: int
    json_path: str | None

    def __post_init__(self) -> None:
        for form in self.forms:
            try:
                page_form(form)
            except KeyError as error:
                known = f"{', '.join(KV_FORMATS)}, and int4+NxDTYPE with N exact layers at each end"
                raise ConfigError(f"--forms {form}: the forms are {known}", field="forms") from error
        if unknown := self.parts - set(PARTS):
            raise ConfigError(f"--only {min(unknown)}: the parts are {', '.join(PARTS)}", field="only")
        if any(model.is_paced for model in self.models):
            raise ConfigError("--model: a paced model predicts nothing", field="model")
        if not self.text.is_file():
            raise ConfigError(f"--text {self.text}: there is no such file", field="text")
        for name in ("windows", "prompts", "prompt_tokens", "continued_tokens", "facts", "context", "threads"):
            positive(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.facts > MOST_FACTS:
            raise ConfigError(f"--facts must be at most {MOST_FACTS}, got {self.facts}", field="facts")
        if self.window_tokens < 2:
            raise ConfigError("--window-tokens must be at least 2: the first token predicts the next", field="window")
        file_can_be_made("--json", self.json_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help=f"what predicts; may be repeated (default {DEFAULT_MODEL})")
    parser.add_argument(
        "--dtype", default=ModelConfig().dtype, help="bfloat16, float16 or float32 (default %(default)s)"
    )
    parser.add_argument(
        "--forms", default=",".join(KV_FORMATS), metavar="FORM,...", help="forms of pages (default %(default)s)"
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), metavar="PART,...", help="what is measured (default %(default)s)"
    )
    parser.add_argument(
        "--text", default=str(TEXT), metavar="FILE", help="what is predicted and continued (default %(default)s)"
    )
    for flag, default, unit, what in (
        ("--windows", 4, "N", "parts of the text that are predicted"),
        ("--window-tokens", 1024, "TOKENS", "length of such a part"),
        ("--prompts", 8, "N", "parts of the text that are continued"),
        ("--prompt-tokens", 256, "TOKENS", "length of such a part"),
        ("--continued-tokens", 128, "TOKENS", "length of a continuation"),
        ("--facts", 10, "N", "facts in a long text"),
        ("--context", 8192, "TOKENS", "its length, question and answer included; a model's longest, if that is less"),
        ("--seed", 0, "N", "of the facts"),
        ("--threads", 1, "N", "cores that compute"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar=unit, help=f"{what} (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> FormOptions:
    forms = dict.fromkeys(each.strip() for each in args.forms.split(","))
    names = dict.fromkeys(args.model or [DEFAULT_MODEL])
    return FormOptions(
        models=tuple(ModelConfig(model=name, dtype=args.dtype, device="cpu") for name in names),
        forms=tuple(form for form in forms if form != args.dtype),
        parts=frozenset(each.strip() for each in args.only.split(",")),
        text=Path(args.text),
        windows=args.windows,
        window_tokens=args.window_tokens,
        prompts=args.prompts,
        prompt_tokens=args.prompt_tokens,
        continued_tokens=args.continued_tokens,
        facts=args.facts,
        context=args.context,
        seed=args.seed,
        threads=args.threads,
        json_path=args.json,
    )
