"""The flags of `tests.trials.bench weights`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.flags.checks import file_can_be_made, positive
from twostroke.base.errors import ConfigError
from twostroke.config import DEFAULT_MODEL, ModelConfig

TEXT: Final = Path(__file__).parents[4] / "docs" / "operations.md"
FORMATS: Final = (
    "FP8 per channel",
    "FP8 in blocks of 128",
    "compressed int8",
    "GPTQ of 8 bits",
    "GPTQ of 4 bits, act-order",
    "GPTQ, zeros",
    "AWQ",
    "compressed int4",
    "compressed MXFP4",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    model: ModelConfig
    formats: tuple[str, ...]
    text: Path
    windows: int
    window_tokens: int
    rounds: int
    """Times that each step is timed; 0 times nothing."""
    threads: int
    json_path: str | None

    def __post_init__(self) -> None:
        if unknown := set(self.formats) - set(FORMATS):
            raise ConfigError(f"--formats {min(unknown)}: the formats are {', '.join(FORMATS)}", field="formats")
        if self.model.is_paced:
            raise ConfigError("--model: a paced model predicts nothing", field="model")
        if not self.text.is_file():
            raise ConfigError(f"--text {self.text}: there is no such file", field="text")
        for name in ("windows", "window_tokens", "threads"):
            positive(f"--{name.replace('_', '-')}", getattr(self, name))
        file_can_be_made("--json", self.json_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what predicts (default %(default)s)")
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), metavar="FORMAT", help=f"some of {', '.join(FORMATS)}"
    )
    parser.add_argument("--text", default=str(TEXT), metavar="FILE", help="what is predicted (default %(default)s)")
    for flag, default, unit, what in (
        ("--windows", 2, "N", "parts of the text that are predicted"),
        ("--window-tokens", 1024, "TOKENS", "length of such a part"),
        ("--rounds", 12, "N", "times that each step is timed; 0 times nothing"),
        ("--threads", 1, "N", "cores that compute"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar=unit, help=f"{what} (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> WeightOptions:
    return WeightOptions(
        model=ModelConfig(model=args.model, dtype="bfloat16", device="cpu"),
        formats=tuple(dict.fromkeys(args.formats)),
        text=Path(args.text),
        windows=args.windows,
        window_tokens=args.window_tokens,
        rounds=args.rounds,
        threads=args.threads,
        json_path=args.json,
    )
