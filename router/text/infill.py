"""Prompts for infilling (fill in the middle), in the form that the special tokens of a model are made for."""

from __future__ import annotations

from dataclasses import dataclass

from router.text.tokenizer import Text
from twostroke.base.errors import UnsupportedFeature


@dataclass(frozen=True, slots=True)
class InfillForm:
    """The form of infill prompts for one family of models."""

    tokens: tuple[str, ...]
    """Entries of the vocabulary by which the form is recognised."""
    template: str
    """The prompt, with `{prefix}` and `{suffix}` in their places."""
    ends: tuple[str, ...] = ()
    """Further entries of the vocabulary that end a middle, such as those of a text's end or of the next file."""


FORMS: tuple[InfillForm, ...] = (
    # Qwen2.5-Coder, CodeGemma
    InfillForm(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite Code
    InfillForm(
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<filename>", "<reponame>"),
    ),
    # DeepSeek Coder
    InfillForm(
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        ("<｜end▁of▁sentence｜>",),
    ),
    # Code Llama
    InfillForm(("▁<PRE>", "▁<SUF>", "▁<MID>"), "<PRE> {prefix} <SUF>{suffix} <MID>", ("▁<EOT>",)),
    # Codestral
    InfillForm(("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{suffix}[PREFIX]{prefix}"),
)
"""One entry for each family, as its makers document it. The first one whose tokens a vocabulary has is used."""


def infill_text(text: Text, prefix: str, suffix: str) -> str:
    """Returns the prompt that asks for the middle between two texts.

    Raises UnsupportedFeature if the model was not trained for it.
    """
    return _form_of(text).template.format(prefix=prefix, suffix=suffix)


def infill_ends(text: Text) -> tuple[int, ...]:
    """Returns the tokens that end a middle. The end token of an instruct model is another one, which seldom follows it.

    Raises UnsupportedFeature if the model was not trained for it.
    """
    form = _form_of(text)
    return tuple(token for piece in (*form.tokens, *form.ends) if (token := text.token_of(piece)) is not None)


def _form_of(text: Text) -> InfillForm:
    for form in FORMS:
        if all(text.token_of(piece) is not None for piece in form.tokens):
            return form
    known = ", ".join(form.tokens[0] for form in FORMS)
    raise UnsupportedFeature(
        f"suffix is not supported by this model: its vocabulary has no tokens for filling in the middle (as {known})",
        field="suffix",
    )
