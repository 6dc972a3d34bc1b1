"""One compilation of a grammar, timed, and the first steps of an answer. A refusal is one line with the field."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from router.text.structured.emptiness import is_endless
from router.text.structured.json_schema import UNSUPPORTED, UnsupportedSchema, checked_schema, schemas_in
from router.text.structured.output import StructuredOutput
from router.text.structured.property_names import check_property_names, roots_of
from router.text.structured.sources import source_of
from twostroke.base.client_text import shown, without_middle
from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.grammar.compiler import LIMITS
from twostroke.request import Grammar

TRIED_TOKENS = 8
"""Most tokens of a trial answer, with which slow masks and dead ends are found before a request is admitted."""
_WALKS = (0.5, 0.0, 0.999)
"""Positions of the tokens of each trial answer among the permitted ones, from 0 for the first up to 1. Only grammars
that clients write are tried with all of them: these may have dead ends."""
MOST_ERROR_CHARS = 300
MOST_PLACES = 3
"""Most places of a keyword that an error names."""

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
    """A grammar that has compiled, with times that were measured in this process."""

    grammar: Grammar
    compile_s: float
    """Seconds that it took to compile."""
    mask_s: float
    """Seconds that one mask took, on average."""


@dataclass(frozen=True, slots=True)
class Refusal:
    cause: str
    """The keyword that is not supported; otherwise `size`, `syntax`, `unsatisfiable` or `other`."""
    error: InvalidRequest


def compile_output(output: StructuredOutput, tokenizer: LLTokenizer) -> CompiledGrammar | Refusal:
    """Compiles a grammar. Whatever a client has written, it raises nothing but MemoryError."""
    started_s = time.perf_counter()
    try:
        grammar = Grammar(source_of(output))
        check_property_names(output)
        if any(is_endless(root, (each for _, each in schemas_in(root))) for root in roots_of(output)):
            return _refusal("unsatisfiable", output, "matches no text of finite length")
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
    try:
        mask_s = _tried(matcher, tokenizer, _WALKS if output.kind == "grammar" else _WALKS[:1])
    except _DeadEndError as dead_end:
        return _refusal("unsatisfiable", output, str(dead_end))
    if matcher.is_error():
        return _of_library(output, matcher.get_error())
    return CompiledGrammar(grammar, compile_s, mask_s)


class _DeadEndError(Exception):
    """A trial answer has no continuation that matches."""


def _tried(matcher: LLMatcher, tokenizer: LLTokenizer, walks: Sequence[float]) -> float:
    """Returns the mean seconds of a mask over the tokens of some trial answers. Raises _DeadEndError."""
    began_s, steps = time.perf_counter(), 0
    first, *others = [matcher, *(matcher.deep_copy() for _ in walks[1:])]
    steps += _walk(first, tokenizer, walks[0])
    for each, place in zip(others, walks[1:], strict=True):
        if not first.is_error():
            steps += _walk(each, tokenizer, place)
    return (time.perf_counter() - began_s) / steps


def _walk(matcher: LLMatcher, tokenizer: LLTokenizer, place: float) -> int:
    """Extends a trial answer with the permitted tokens at `place`. Returns the number of masks that were computed."""
    text = list[int]()
    for step in range(1, TRIED_TOKENS + 1):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        is_end = not matcher.is_error() and bool(bits[list(tokenizer.eos_tokens)].any())
        bits[list(tokenizer.eos_tokens)] = 0
        permitted = np.flatnonzero(bits)
        if not len(permitted):
            has_failed = matcher.is_error() and not matcher.get_error().startswith("NoExtension")
            if not has_failed and not (is_end and _may_end(matcher, tokenizer)):
                raise _DeadEndError(_dead_end(tokenizer.decode_str(text)))
            return step
        token = int(permitted[int(len(permitted) * place)])
        if not matcher.consume_token(token):
            return step
        text.append(token)
    return TRIED_TOKENS


def _may_end(matcher: LLMatcher, tokenizer: LLTokenizer) -> bool:
    """Returns whether the text matches, alone or with an end token that the grammar names."""
    ended = matcher.deep_copy()
    return bool(matcher.is_accepting() or (ended.consume_token(tokenizer.eos_token) and ended.is_accepting()))


def _dead_end(text: str) -> str:
    return f"has a dead end: nothing may follow {shown(text)}" if text else "matches no text at all"


def _of_library(output: StructuredOutput, message: str) -> Refusal:
    cause = _cause(message)
    if cause == "oneOf" and output.kind == "json":
        schema = checked_schema(json.loads(output.body), output.field, is_strict=output.is_strict)
        places = [str(place) for place, each in schemas_in(schema) if "oneOf" in each]
        shown = ", ".join(places[:MOST_PLACES]) + ", ..." * (len(places) > MOST_PLACES)
        return _refusal(
            cause, output, f'"oneOf" is supported only where no value can match two of its alternatives; see {shown}'
        )
    return _refusal(cause, output, _plain(message))


def _cause(message: str) -> str:
    for pattern, cause in _CAUSES:
        if (matched := re.search(pattern, message)) is not None:
            return cause or (matched[1] if matched[1] in UNSUPPORTED else "other")
    return "syntax"


def _plain(message: str) -> str:
    """Returns llguidance's error in one line, without the listing below it."""
    if message.startswith("panic"):
        return "the grammar is too large"
    lines = message.splitlines()
    first = re.sub(r"^at 1\(8\): |:? ?regex parse error:$|:$", "", lines[0]) or "invalid regex"
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return without_middle(": ".join([first, *reasons[:1]]), MOST_ERROR_CHARS)


def _refusal(cause: str, output: StructuredOutput, problem: str) -> Refusal:
    kind = UnsupportedFeature if cause not in ("syntax", "unsatisfiable", "size") else InvalidRequest
    message = (
        f"{output.field} {problem}" if problem.startswith(("is ", "matches ", "has ")) else f"{output.field}: {problem}"
    )
    return Refusal(cause, kind(message, field=output.field))
