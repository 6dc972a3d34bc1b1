"""The flags of `tests.bench forms`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from cluster.flags.checks import file_can_be_made, positive
from twostroke.config import DEFAULT_MODEL, ModelConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.errors import ConfigError

TEXT = Path(__file__).parents[3] / "docs" / "tour.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    model: ModelConfig
    forms: tuple[str, ...]
    """Without the model's own dtype, which is what they are compared with."""
    text: Path
    windows: int
    window_tokens: int
    json_path: str | None

    def __post_init__(self) -> None:
        for form in self.forms:
            if form not in KV_FORMATS:
                raise ConfigError(f"--forms {form}: the forms are {', '.join(KV_FORMATS)}", field="forms")
        if self.model.is_paced:
            raise ConfigError("--model: a paced model predicts nothing", field="model")
        if not self.text.is_file():
            raise ConfigError(f"--text {self.text}: there is no such file", field="text")
        positive("--windows", self.windows)
        if self.window_tokens < 2:
            raise ConfigError("--window-tokens must be at least 2: the first token predicts the next", field="window")
        file_can_be_made("--json", self.json_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what predicts (default %(default)s)")
    parser.add_argument(
        "--dtype", default=ModelConfig().dtype, help="bfloat16, float16 or float32 (default %(default)s)"
    )
    parser.add_argument(
        "--forms", default=",".join(KV_FORMATS), metavar="FORM,...", help="forms of pages (default %(default)s)"
    )
    parser.add_argument("--text", default=str(TEXT), metavar="FILE", help="what is predicted (default %(default)s)")
    parser.add_argument("--windows", type=int, default=4, metavar="N", help="parts of the text (default %(default)s)")
    parser.add_argument(
        "--window-tokens", type=int, default=1024, metavar="TOKENS", help="length of a part (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> FormOptions:
    model = ModelConfig(model=args.model, dtype=args.dtype, device="cpu")
    forms = tuple(dict.fromkeys(each.strip() for each in args.forms.split(",")))
    return FormOptions(
        model=model,
        forms=tuple(form for form in forms if form != model.dtype),
        text=Path(args.text),
        windows=args.windows,
        window_tokens=args.window_tokens,
        json_path=args.json,
    )
