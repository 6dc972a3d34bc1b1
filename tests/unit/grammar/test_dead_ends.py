"""A dead end of a grammar is named as what it is, and no answer ends there as if its text matched."""

from __future__ import annotations

import pytest

from tests.unit.grammar.grammars import byte_compiler, lark, schema, text_state
from twostroke.base.errors import InvalidRequest
from twostroke.base.token_mask import permitted
from twostroke.grammar.advance import Advance
from twostroke.grammar.state import DEAD_END, GrammarState
from twostroke.request import Grammar, SampledToken, plain_token

END = 256
OVERLAPPING = schema(
    {
        "type": "object",
        "properties": {"score": {"type": "integer"}},
        "patternProperties": {"^score$": {"type": "integer"}},
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
NOTHING_FOLLOWS = lark('start: "a" ("b" | "c" "d" X)\nX: /[a-z]/ & /[0-9]/')
END_WITHIN = lark('start: "x" <[256]> "y"')
DEAD_ENDS = [(OVERLAPPING, '{"score":1,'), (NOTHING_FOLLOWS, "acd")]


def advanced(state: GrammarState, *tokens: SampledToken, drafts: str = "") -> Advance:
    advance = Advance(state, tokens, list(drafts.encode()), 50, takes_forced=True, ends=(END,))
    advance.run()
    return advance


@pytest.mark.parametrize(("grammar", "text"), DEAD_ENDS)
def test_an_answer_that_runs_into_a_dead_end_fails_and_says_so(grammar: Grammar, text: str) -> None:
    advance = advanced(text_state(grammar, text[:-1]), plain_token(ord(text[-1])))
    assert advance.failed is not None
    assert advance.state.failure == DEAD_END
    assert not advance.state.mask.any(), "not even an end token may come"


@pytest.mark.parametrize(("grammar", "text"), DEAD_ENDS)
def test_an_answer_that_has_run_into_a_dead_end_is_not_resumed(grammar: Grammar, text: str) -> None:
    with pytest.raises(InvalidRequest, match="has a dead end") as refusal:
        text_state(grammar, text)
    assert refusal.value.field == "grammar"


@pytest.mark.parametrize(("grammar", "text"), DEAD_ENDS)
def test_no_token_may_come_behind_drafts_that_lead_into_a_dead_end(grammar: Grammar, text: str) -> None:
    state = text_state(grammar, text[:1])
    *before, last = state.masks_along(list(text[1:].encode()))
    assert all(mask.any() for mask in before)
    assert not last.any()
    assert state.failure is None, "the drafts are not the answer's yet"


def test_an_answer_fails_where_no_token_was_drawn_behind_a_draft_into_a_dead_end() -> None:
    undrawn = SampledToken(0, is_sound=False)
    advance = advanced(text_state(NOTHING_FOLLOWS, "ac"), plain_token(ord("d")), undrawn, drafts="d")
    assert [token.token for token in advance.tokens] == [ord("d")]
    assert advance.failed is undrawn
    assert advance.state.failure == DEAD_END


def test_an_end_token_in_the_middle_of_a_grammar_does_not_end_an_answer_as_if_it_matched() -> None:
    state = text_state(END_WITHIN, "x")
    assert permitted(state.mask, 257).tolist() == [END]
    advance = advanced(state, plain_token(END))
    assert not advance.tokens, "nobody is told that the answer has ended"
    assert advance.failed is not None
    assert advance.state.failure == DEAD_END


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (lark('start: "x" <[256]>'), "x"),
        (lark("start: /a+/"), "aa"),
        (lark('start: "b"'), "b"),
    ],
)
def test_an_end_token_ends_an_answer_that_matches(grammar: Grammar, text: str) -> None:
    advance = advanced(text_state(grammar, text), plain_token(END))
    assert [token.token for token in advance.tokens] == [END]
    assert advance.failed is None


def test_each_of_several_end_tokens_ends_an_answer_that_matches() -> None:
    for end in (259, 257):
        state = byte_compiler(260, (259, 257)).state(lark("start: /a+/"), [97])
        advance = Advance(state, [plain_token(end)], (), 9, takes_forced=True, ends=(259, 257))
        advance.run()
        assert [token.token for token in advance.tokens] == [end]
        assert advance.failed is None


def test_a_token_that_a_request_stops_at_may_come_before_the_text_matches() -> None:
    state = text_state(lark('start: "a" "b" "c"'), "a")
    advance = Advance(state, [plain_token(ord("b"))], (), 9, takes_forced=True, ends=(END, ord("b")))
    advance.run()
    assert [token.token for token in advance.tokens] == [ord("b")]
    assert advance.failed is None
