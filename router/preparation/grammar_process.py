"""The process that compiles grammars. The router writes them to its stdin; see `router.preparation.process`.

`python -m router.preparation.grammar_process PARENT NICE CPU_S MODEL_DIR DIGEST`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from router.preparation.process import serve
from router.requests.work import PreparationOutcome
from router.text.structured.compile import compile_output
from twostroke.base.errors import InvalidRequest

MOST_BYTES = 256 << 20
"""Bytes of address space for one grammar, in addition to what the process has at its start."""


def main() -> None:
    serve(_compiles, MOST_BYTES)


def _compiles(model_dir: str) -> Callable[[Any], PreparationOutcome]:
    tokenizer = load_tokenizer(model_dir)

    def compile_one(output: Any) -> PreparationOutcome:
        try:
            return PreparationOutcome(value=compile_output(output, tokenizer))
        except MemoryError:
            return PreparationOutcome(error=InvalidRequest("it takes more memory than one may have"))

    return compile_one


def load_tokenizer(model_dir: str) -> LLTokenizer:
    """Returns the tokenizer of the model in `model_dir`. That of a paced model ("") has bytes as tokens."""
    if not model_dir:
        return LLTokenizer("byte")
    return LLTokenizer((Path(model_dir) / "tokenizer.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
