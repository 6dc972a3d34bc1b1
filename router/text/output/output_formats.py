"""The formats in which models write tool calls and reasoning, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.text.output import think
from router.text.output.collected_parts import CallIds
from router.text.output.formats import harmony, hermes, llama3_json, mistral, pythonic, qwen3_coder
from router.text.output.formats.harmony import HarmonySyntax
from router.text.output.formats.hermes import HermesSyntax
from router.text.output.formats.llama3_json import Llama3JsonSyntax
from router.text.output.formats.mistral import MistralSyntax
from router.text.output.formats.pythonic import PythonicSyntax
from router.text.output.formats.qwen3_coder import Qwen3CoderSyntax
from router.text.output.framing import FramedParser, Framing, Syntax, Tools, Unmarked
from router.text.output.grammars.calls import MakeGrammar
from router.text.output.parts import OutputParser
from router.text.output.think import ThinkParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    make: type[Syntax]
    grammar: MakeGrammar
    special: tuple[str, ...] = ()
    """Special tokens that the parser has to see, although clients do not."""
    signs: tuple[str, ...]
    """A chat template that has one of these texts asks the model for this format."""
    other_names: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_chars: int = 24
    """Hexadecimal digits of a call's id after the prefix."""

    def call_id(self, drawn: str) -> str:
        """Returns a call's id, given at least as many random hexadecimal digits."""
        return self.id_prefix + drawn[: self.id_chars]

    def parser(self, tools: Tools, call_id: CallIds, *, unmarked: Unmarked = Unmarked.ANY) -> FramedParser:
        framing = Framing(self.make.MARKS, call_id, unmarked=unmarked)
        return FramedParser(self.make(tools, framing), framing)


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="harmony",
        grammar=harmony.grammar,
        make=HarmonySyntax,
        special=HarmonySyntax.MARKS,
        signs=(harmony.CHANNEL,),
        other_names=("openai",),
    ),
    ToolFormat(
        name="qwen3_coder",
        grammar=qwen3_coder.grammar,
        make=Qwen3CoderSyntax,
        special=("<tool_call>", "</tool_call>"),
        signs=("<function=",),
        other_names=("qwen3_xml",),
    ),
    ToolFormat(
        name="hermes",
        grammar=hermes.grammar,
        make=HermesSyntax,
        special=(hermes.OPEN, hermes.CLOSE),
        signs=("<tool_call>",),
    ),
    ToolFormat(
        name="mistral",
        grammar=mistral.grammar,
        make=MistralSyntax,
        special=(mistral.CALLS, mistral.ID, mistral.ARGUMENTS),
        signs=(mistral.CALLS,),
        id_prefix="",
        id_chars=9,  # Mistral's templates refuse other ids
    ),
    ToolFormat(
        name="pythonic",
        grammar=pythonic.grammar,
        make=PythonicSyntax,
        special=PythonicSyntax.MARKS,
        signs=(pythonic.START, "[func_name1("),
        other_names=("llama4_pythonic",),
    ),
    ToolFormat(
        name="llama3_json",
        grammar=llama3_json.grammar,
        make=Llama3JsonSyntax,
        special=Llama3JsonSyntax.MARKS,
        signs=(llama3_json.PYTHON_TAG, '"parameters": dictionary of argument name'),
        other_names=("llama4_json",),
    ),
)
"""Templates are compared in this order: later formats have signs that templates of earlier ones may have, too."""

TOOLS_BY_NAME: Mapping[str, ToolFormat] = {
    name: each for each in TOOL_FORMATS for name in (each.name, *each.other_names)
}


def tool_format_in(template: str) -> ToolFormat | None:
    """Returns the format that a chat template asks for; None: it knows no tools, or another format."""
    return next((each for each in TOOL_FORMATS if any(sign in template for sign in each.signs)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    name: str
    make: Callable[[bool], OutputParser] | None
    """Makes a parser, given whether the prompt has begun the reasoning. None: the tool format of that name does it."""
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

REASONING_BY_NAME: Mapping[str, ReasoningFormat] = {
    name: each for each in REASONING_FORMATS for name in (each.name, *each.other_names)
}


def reasoning_format_in(template: str) -> ReasoningFormat | None:
    """Returns the format of reasoning that a chat template shows. None: it shows none of these."""
    return next((each for each in REASONING_FORMATS if any(sign in template for sign in each.signs)), None)
