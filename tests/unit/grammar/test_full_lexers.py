"""How much a grammar may take is a limit of each answer: none uses it up for another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

import twostroke.grammar.compiler as compiler_module
from tests.unit.grammar.grammars import byte_compiler, regex
from twostroke.base.token_mask import permitted
from twostroke.grammar.compiler import GrammarCompiler, LLParserLimits
from twostroke.grammar.state import LEAST_RENEWED_TOKENS, TOO_LONG, GrammarState
from twostroke.grammar.vocabulary import load_vocabulary

GROWING = regex("[a-z ]*a[a-z ]{40}Z")
"""Each further token has readings that nobody has had: the lexer grows with the length of all answers."""
STATES = 3000
"""Lexer states of a compiled grammar in these tests, so that they take little time."""
WRITTEN = "a few words of an answer that "


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    return byte_compiler()


def write(state: GrammarState, tokens: int, seed: int = 0) -> None:
    draws = np.random.default_rng(seed)
    for _ in range(tokens):
        assert state.mask.any()
        state.consume(int(draws.choice(list(b"abcdefgh a"))))
        assert state.failure is None


def test_an_answer_that_fills_the_lexer_ends_no_other_and_refuses_no_new_one(compiler: GrammarCompiler) -> None:
    other = compiler.state(GROWING, list(WRITTEN.encode()))
    expected = byte_compiler().state(GROWING, list(WRITTEN.encode()))
    write(compiler.state(GROWING), 900)
    for token in b"goes on":
        other.consume(token)
        expected.consume(token)
        assert other.failure is None
        np.testing.assert_array_equal(other.mask, expected.mask)
    new = compiler.state(GROWING)
    write(new, 40, seed=1)


def test_an_answer_goes_on_with_the_same_masks_when_its_own_lexer_is_full(compiler: GrammarCompiler) -> None:
    state, draws = compiler.state(GROWING), np.random.default_rng(3)
    roomy = LLMatcher(compiler.vocabulary.tokenizer, GROWING.source, log_level=0)
    for count in range(900):
        token = int(draws.choice(list(b"abcdefgh a")))
        state.consume(token)
        roomy.consume_token(token)
        assert state.failure is None
        if count % 50 == 49:
            assert state.mask.tobytes()[:32] == roomy.compute_bitmask()[:32]
            assert state.permitted_prefix(list(b"abc")) == 3
            assert all(mask.any() for mask in state.masks_along(list(b"abc")))


def test_what_one_answer_uses_up_within_a_few_tokens_is_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_lexer_states=20, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    state = byte_compiler().state(GROWING)
    for token in WRITTEN.encode() * 3:
        state.consume(token)
        assert state.mask.any() is np.bool_(state.failure is None)
        if state.failure is not None:
            break
    assert state.failure == TOO_LONG
    assert state.tokens < 4 * LEAST_RENEWED_TOKENS


def test_a_regex_that_one_answer_uses_up_serves_others_with_a_real_vocabulary(smollm2_dir: Path) -> None:
    compiler = GrammarCompiler(load_vocabulary(str(smollm2_dir), 49152, (2,)))
    tokens = compiler.vocabulary.tokenizer.tokenize_str("an answer that another tenant has begun and goes on with")
    first, second = compiler.state(GROWING), compiler.state(GROWING, tokens[:4])
    draws = np.random.default_rng(1)
    for _ in range(164):
        ids = permitted(first.mask, 49152)
        assert first.failure is None
        first.consume(int(draws.choice(ids[ids != 2])))
    second.replay(tokens[4:])
    assert second.mask.any()
    assert second.failure is None
    assert compiler.state(GROWING, tokens).mask.any()
