"""One compilation of a grammar, timed, and the first steps of an answer. A refusal is one line with the field."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from router.frontend.structured.json_schema import UNSUPPORTED, UnsupportedSchema, schemas_in
from router.frontend.structured.output import StructuredOutput
from router.frontend.structured.sources import source_of
from twostroke.client_text import without_middle
from twostroke.errors import InvalidRequest, UnsupportedFeature
from twostroke.grammar.compiler import LIMITS
from twostroke.request import Grammar

TRIED_TOKENS = 8
"""Tokens of a made-up answer: a grammar whose masks take long is found out before it is admitted."""
MOST_ERROR_CHARS = 300
MOST_PLACES = 3
"""Places of a keyword that an error names."""

_CAUSES: tuple[tuple[str, str], ...] = (
    (r"oneOf constraints", "oneOf"),
    (r"Unimplemented keys: \[\"([^\"]+)\"", ""),
    (r"min/maxProperties", "maxProperties"),
    (r"patternProperty", "patternProperties"),
    (r"Unknown format", "format"),
    (r"too (large|big|deep|complex)|fuel|limit|panic|exceeded|Too many", "size"),
    (r"Resource '|\breference", "$ref"),
    (r"Unsatisfiable", "unsatisfiable"),
    (r"regex|look-?around", "pattern"),
)
"""Patterns of llguidance's errors, and the cause of each; an empty cause is the pattern's first group."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is known to compile, with what that and a mask took here."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Refusal:
    cause: str
    """The keyword that cannot be kept to; otherwise `size`, `syntax`, `unsatisfiable` or `other`."""
    error: InvalidRequest


def compile_output(output: StructuredOutput, tokenizer: LLTokenizer) -> CompiledGrammar | Refusal:
    """Never raises for what a client may have written, save MemoryError."""
    started_s = time.perf_counter()
    try:
        grammar = Grammar(source_of(output))
    except UnsupportedSchema as error:
        return Refusal(error.keyword, error)
    except InvalidRequest as error:
        return Refusal("syntax", error)
    except RecursionError:
        return _refusal("size", output, "is nested too deeply")
    except ValueError as error:  # llguidance's, for JSON that it cannot read
        is_deep = "recursion limit" in str(error)
        return _refusal("size" if is_deep else "syntax", output, "is nested too deeply" if is_deep else str(error))
    matcher = LLMatcher(tokenizer, grammar.source, log_level=0, limits=LIMITS)
    compile_s = time.perf_counter() - started_s
    if matcher.is_error():
        return _of_library(output, matcher.get_error())
    mask_s = _tried(matcher, tokenizer)
    if mask_s is None:
        return _refusal("unsatisfiable", output, "matches no text at all")
    if matcher.is_error():
        return _of_library(output, matcher.get_error())
    return CompiledGrammar(Grammar(grammar.source, compile_s, mask_s))


def _tried(matcher: LLMatcher, tokenizer: LLTokenizer) -> float | None:
    """Returns the mean seconds of a mask over the first tokens of an answer; None where no answer can begin."""
    began_s, steps = time.perf_counter(), 0
    for _ in range(TRIED_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        bits[list(tokenizer.eos_tokens)] = 0
        permitted, steps = np.flatnonzero(bits), steps + 1
        if not len(permitted):
            is_dead = not matcher.is_error() or matcher.get_error().startswith("NoExtension")
            if steps == 1 and is_dead and not matcher.is_accepting():
                return None
            break
        if not matcher.consume_token(int(permitted[len(permitted) // 2])):
            break
    return (time.perf_counter() - began_s) / steps


def _of_library(output: StructuredOutput, said: str) -> Refusal:
    cause = _cause(said)
    if cause == "oneOf" and output.kind == "json":
        places = [str(place) for place, schema in schemas_in(json.loads(output.body)) if "oneOf" in schema]
        shown = ", ".join(places[:MOST_PLACES]) + ", ..." * (len(places) > MOST_PLACES)
        return _refusal(
            cause, output, f'"oneOf" is supported only where no value can match two of its alternatives; see {shown}'
        )
    return _refusal(cause, output, _plain(said))


def _cause(said: str) -> str:
    for pattern, cause in _CAUSES:
        if (matched := re.search(pattern, said)) is not None:
            return cause or (matched[1] if matched[1] in UNSUPPORTED else "other")
    return "syntax"


def _plain(said: str) -> str:
    """Returns llguidance's error in one line, without the listing below it."""
    if said.startswith("panic"):
        return "the grammar is too large"
    lines = said.splitlines()
    first = re.sub(r"^at 1\(8\): |:? ?regex parse error:$|:$", "", lines[0]) or "invalid regex"
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return without_middle(": ".join([first, *reasons[:1]]), MOST_ERROR_CHARS)


def _refusal(cause: str, output: StructuredOutput, problem: str) -> Refusal:
    kind = UnsupportedFeature if cause not in ("syntax", "unsatisfiable", "size") else InvalidRequest
    said = f"{output.field} {problem}" if problem.startswith(("is ", "matches ")) else f"{output.field}: {problem}"
    return Refusal(cause, kind(said, field=output.field))
