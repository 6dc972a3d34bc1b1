"""The formats in which models write reasoning, one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.text.output import think
from router.text.output.formats import harmony
from router.text.output.parts import OutputParser
from router.text.output.think import ThinkParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    name: str
    make: Callable[[bool], OutputParser] | None
    """Takes whether the prompt has begun the reasoning. None: the format of calls with this name splits it off, too."""
    opening: str = ""
    """A prompt that ends with this has begun the reasoning."""
    special: tuple[str, ...] = ()
    """Special tokens that the parser has to see, although clients do not."""
    signs: tuple[str, ...]
    """A chat template that has one of these texts is for a model that reasons so."""
    other_names: tuple[str, ...] = ()


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(name="harmony", make=None, signs=(harmony.CHANNEL,), other_names=("openai_gptoss",)),
    ReasoningFormat(
        name="think",
        make=lambda is_open: ThinkParser(is_open=is_open),
        opening=think.OPEN,
        special=(think.OPEN, think.CLOSE),
        signs=(think.OPEN, think.CLOSE),
        other_names=("deepseek_r1", "qwen3"),
    ),
)

BY_NAME: Mapping[str, ReasoningFormat] = {
    name: each for each in REASONING_FORMATS for name in (each.name, *each.other_names)
}


def format_in(template: str) -> ReasoningFormat | None:
    """Returns the format of the model that a chat template is for; None: it does not reason, or in another format."""
    return next((each for each in REASONING_FORMATS if any(sign in template for sign in each.signs)), None)
