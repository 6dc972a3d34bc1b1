"""A test bed for JSON schemas: what is refused, and whether answers that may be given violate their schema.

For a schema that compiles, instances that its set marks are consumed token by token, as a decode worker would, by the
letter of JSON Schema. Random walks over the permitted tokens make answers that `jsonschema` checks; there the schema is
closed, as it is by default.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt

from router.text.structured.compile import Refusal, compile_output
from router.text.structured.output import StructuredOutput
from twostroke.base.token_mask import WORD_BITS, permitted
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Grammar

VOCAB_SIZE, END_TOKENS = 49_152, (2,)
"""The width of SmolLM2's logits, and `<|im_end|>`."""
WALK_TOKENS = 400
"""Tokens of a walk; one that has not ended by then counts as unfinished."""
WANDER_TOKENS = 100
"""Tokens after which a walk nearly always closes what is open."""
OTHER_ORDER = frozenset({"Github_hard---o37075"})
"""Schemas whose instances have their properties in another order than the schema, which no answer has."""
CLOSING = b'"}],:'
"""First bytes of tokens that bring a walk nearer to its end."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A schema, and instances that are marked valid or not."""

    name: str
    schema: Any
    tests: list[Any]


@dataclass(slots=True)
class Tally:
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Schemas by the cause of their refusal."""
    compiled: int = 0
    valid: int = 0
    invalid: int = 0
    """Instances of the schemas that compiled."""
    walks: int = 0
    unfinished: int = 0
    problems: list[str] = field(default_factory=list)
    """Instances on the wrong side, and answers that violate their schema."""
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)


def entries(path: Path) -> Iterator[Entry]:
    packed = path.read_bytes()
    for line in (gzip.decompress(packed) if path.suffix == ".gz" else packed).splitlines():
        said = json.loads(line)
        yield Entry(said["name"], said["schema"], said["tests"])


class Bed:
    """Tries schemas with SmolLM2's vocabulary."""

    def __init__(self, model_dir: str, seed: int) -> None:
        self.tally = Tally()
        self._vocabulary = load_vocabulary(model_dir, VOCAB_SIZE, END_TOKENS)
        self._compiler = GrammarCompiler(self._vocabulary, self.tally.mask_s.append)
        self._draws = random.Random(seed)
        tokenizer = self._vocabulary.tokenizer
        self._bytes = [tokenizer.decode_bytes([token]) for token in range(VOCAB_SIZE)]
        self._closes = np.array([text[:1] in CLOSING and text != b"" for text in self._bytes])

    def try_schema(self, entry: Entry, *, is_strict: bool, walks: int) -> None:
        text = json.dumps(entry.schema, ensure_ascii=False).encode()
        by_letter = StructuredOutput("json", text, "schema", is_strict, is_open=True)
        outcome = compile_output(by_letter, self._vocabulary.tokenizer)
        closed = compile_output(dataclasses.replace(by_letter, is_open=False), self._vocabulary.tokenizer)
        if isinstance(outcome, Refusal):
            self.tally.refused[outcome.cause] += 1
            return
        if isinstance(closed, Refusal):
            self.tally.problems.append(f"{entry.name}: refused where it is closed: {closed.error.message[:200]}")
            return
        self.tally.compiled += 1
        self.tally.compile_s.append(outcome.compile_s)
        for test in entry.tests if entry.name not in OTHER_ORDER else ():
            self._try_instance(entry.name, outcome.grammar, test["data"], bool(test["valid"]))
        kind = jsonschema.validators.validator_for(entry.schema, default=jsonschema.Draft202012Validator)
        for _ in range(walks):
            self._try_walk(entry.name, closed.grammar, kind(entry.schema))

    def _try_instance(self, name: str, grammar: Grammar, instance: Any, is_valid: bool) -> None:
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        state = self._compiler.state(grammar)
        is_taken = True
        for token in self._vocabulary.tokenizer.tokenize_str(text):
            if not (is_taken := self._permits(state, token)):
                break
            state.consume(token)
        is_taken = is_taken and self._permits(state, self._vocabulary.end)
        self.tally.valid += is_valid
        self.tally.invalid += not is_valid
        if is_taken != is_valid:
            self.tally.problems.append(f"{name}: {'refused valid' if is_valid else 'accepted invalid'} {text[:200]}")

    def _try_walk(self, name: str, grammar: Grammar, validator: Any) -> None:
        self.tally.walks += 1
        answer = self._walk(self._compiler.state(grammar))
        if answer is None:
            self.tally.unfinished += 1
            return
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(answer)))
        except ValueError as not_json:
            self.tally.problems.append(f"{name}: {not_json} in {answer[:200]!r}")
            return
        if error is not None:
            self.tally.problems.append(f"{name}: {error.message[:200]} in {answer[:200]!r}")

    def _walk(self, state: GrammarState) -> bytes | None:
        """Returns the text of an answer drawn at random among what is permitted; None where it does not end."""
        text = b""
        for step in range(WALK_TOKENS):
            assert state.failure is None, state.failure
            tokens = permitted(state.mask, self._vocabulary.size)
            others = tokens[tokens != self._vocabulary.end]
            is_end = len(others) < len(tokens)
            if is_end and (not len(others) or step > WANDER_TOKENS or self._draws.random() < 0.4):
                return text
            token = self._drawn(others, step)
            text += self._bytes[token]
            state.consume(token)
        return None

    def _drawn(self, tokens: npt.NDArray[np.int64], step: int) -> int:
        closing = tokens[self._closes[tokens]]
        closes = len(closing) and self._draws.random() < (0.6 if step < WANDER_TOKENS else 0.97)
        return int(self._draws.choice(closing if closes else tokens))

    def _permits(self, state: GrammarState, token: int) -> bool:
        word, bit = divmod(token, WORD_BITS)
        return bool(state.mask[word] >> np.uint32(bit) & np.uint32(1))
