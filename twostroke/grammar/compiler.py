"""Compiles grammars for one vocabulary, and keeps those that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits

from twostroke.base.errors import InvalidRequest
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import Vocabulary
from twostroke.request import Grammar

KEPT_GRAMMARS = 256
"""Most compiled grammars that are kept."""
KEPT_CHARS = 1 << 20
"""Most characters in the sources of all kept grammars. An object with thousands of properties takes 460 bytes per
character, so hostile grammars take half a gigabyte; 256 sets of ordinary tools are kept."""
MOST_ERROR_CHARS = 300
"""Most characters of llguidance's message that an error quotes."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Bounds of what one grammar may take: about 50 MB of lexer states, and some tens of milliseconds for one mask.

Copies of a matcher share the lexer and its states. An answer that finds it full continues with a lexer of its own.
"""


class GrammarCompiler:
    """Compiles grammars. The methods may be called on any thread: compiling releases the GIL."""

    def __init__(self, vocabulary: Vocabulary, observe_mask_s: Callable[[float], None] = lambda seconds: None) -> None:
        self.vocabulary = vocabulary
        self._observe_mask_s = observe_mask_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._kept_chars = 0
        self._lock = threading.Lock()

    def state(self, grammar: Grammar, tokens: Sequence[int] = ()) -> GrammarState:
        """Returns the state of an answer that has these tokens already, with its mask.

        Raises InvalidRequest for a grammar that cannot be compiled or followed, and for tokens that it does not permit.
        """
        shared = self._shared(grammar)
        state = GrammarState(
            shared.deep_copy(),
            self.vocabulary,
            self._observe_mask_s,
            partial(self._renewed, grammar, shared),
            bounds_digits=has_json(grammar),
        )
        state.replay(tokens)
        state.compute_mask()
        if state.failure is not None:
            raise InvalidRequest(state.failure, field="grammar")
        return state

    def _shared(self, grammar: Grammar) -> LLMatcher:
        """Returns the matcher that answers copy. They share its lexer, which grows with each of them."""
        digest = grammar.digest
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
                return kept.matcher
        matcher = self._compiled(grammar)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {in_words(matcher.get_error())}", field="grammar")
        self._keep(digest, _Kept(matcher, len(grammar.source)))
        return matcher

    def _renewed(self, grammar: Grammar, full: LLMatcher) -> LLMatcher:
        """Returns a new matcher for one answer, and drops `full`, whose lexer is full, so that later answers get no
        copies of it."""
        with self._lock:
            kept = self._kept.get(grammar.digest)
            if kept is not None and kept.matcher is full:
                del self._kept[grammar.digest]
                self._kept_chars -= kept.chars
        return self._compiled(grammar)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        return LLMatcher(self.vocabulary.tokenizer, grammar.source, log_level=0, limits=LIMITS)

    def _keep(self, digest: bytes, compiled: _Kept) -> None:
        with self._lock:
            if digest in self._kept:  # another thread was first
                return
            self._kept[digest] = compiled
            self._kept_chars += compiled.chars
            while len(self._kept) > KEPT_GRAMMARS or (self._kept_chars > KEPT_CHARS and len(self._kept) > 1):
                _, dropped = self._kept.popitem(last=False)
                self._kept_chars -= dropped.chars


class _Kept(NamedTuple):
    matcher: LLMatcher
    chars: int
    """Characters of the grammar's source."""


def has_json(grammar: Grammar) -> bool:
    """Returns whether a grammar contains a JSON schema."""
    return '"json_schema"' in grammar.source or "%json" in grammar.source


def in_words(error: str) -> str:
    """Returns llguidance's error as one short line."""
    line = " ".join(error.partition("\n\n")[0].split())
    return line if len(line) <= MOST_ERROR_CHARS else f"{line[:MOST_ERROR_CHARS]}..."
