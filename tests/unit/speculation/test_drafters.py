"""Drafters: what they propose, and from whose text."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES
from twostroke.speculation.answers import (
    LONGEST,
    MOST_TOKENS,
    OWN_TOKENS,
    SUFFIXES_AT_ONCE,
    AnswerSuffixes,
    FinishedAnswers,
)
from twostroke.speculation.draft import Proposal
from twostroke.speculation.drafters import DRAFTERS, ModelDrafter
from twostroke.speculation.prompt_lookup import MATCHED, REACH, PromptLookup
from twostroke.speculation.speculation import MOST_DRAFTED
from twostroke.speculation.suffix_tree import DEPTH, LEAST_SHARE, MOST_LOOKED_AT, SuffixTree

DOCS = Path(__file__).resolve().parents[3] / "docs" / "speculation.md"


def test_the_setting_names_the_drafters_of_the_table() -> None:
    assert set(DRAFTER_NAMES) == set(DRAFTERS)


def test_the_docs_say_how_far_drafters_reach_and_how_much_they_propose() -> None:
    text = " ".join(DOCS.read_text().split())
    longest, longer, least = MATCHED
    for said in (
        f"the last {longest}, {longer} or {least} tokens where they stood last",
        f"the last {REACH:,} tokens, in the prompt",
        f"first {LONGEST:,} tokens of each answer",
        f"as many as have {MOST_TOKENS:,} tokens together",
        f"at most {MOST_DRAFTED} tokens",
    ):
        assert said in text, said


def test_what_a_draft_model_drew_is_proposed_until_the_answer_goes_on() -> None:
    drafter = ModelDrafter()
    assert drafter.propose([1, 2], 4) is None
    drafter.drafted([1, 2], (3, 4, 5))
    assert drafter.propose([1, 2], 2) == Proposal((3, 4), DRAFT_MODEL)
    assert drafter.propose([1, 2], 0) is None
    assert drafter.propose([1, 2, 3], 4) is None


def test_lookup_proposes_what_followed_the_last_time() -> None:
    known = [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 1, 2]
    proposal = PromptLookup().propose(known, 4)
    assert proposal == Proposal((3, 4, 5, 6), "lookup 2")


def test_lookup_prefers_the_longest_run_to_the_latest() -> None:
    run = [1, 2, 3, 4]
    known = [*run, 50, 9, 3, 4, 60, *run]
    proposal = PromptLookup().propose(known, 1)
    assert proposal == Proposal((50,), "lookup 4")


def test_lookup_goes_on_with_a_loop() -> None:
    assert PromptLookup().propose([7, 8, 9, 7, 8, 9, 7, 8], 7) == Proposal((9, 7, 8, 9, 7, 8, 9), "lookup 4")


def test_lookup_has_no_idea_of_what_never_stood() -> None:
    assert PromptLookup().propose([1, 2, 3, 4], 4) is None
    assert PromptLookup().propose([1], 4) is None


def test_lookup_is_the_same_however_its_text_grew() -> None:
    draw = random.Random(5)
    known = draw.choices(range(4), k=300)
    grown = PromptLookup()
    for end in range(1, len(known) + 1):
        proposal = grown.propose(known[:end], 8)
        assert proposal == PromptLookup().propose(known[:end], 8)
        if proposal is not None:
            length = int(proposal.kind.split()[1])
            last, places = known[end - length : end], range(length, end)
            place = max(place for place in places if known[place - length : place] == last)
            expected = known[place:end]
            while len(expected) < 8:
                expected.append(expected[len(expected) - (end - place)])
            assert proposal.tokens == tuple(expected[:8])
            assert not any(
                known[p - n : p] == known[end - n : end] for n in MATCHED if n > length for p in range(n, end)
            )


def test_what_lies_far_behind_is_not_searched() -> None:
    known = [1, 2, *range(10, 10 + REACH - 4), 1, 2]
    assert PromptLookup().propose(known, 1) == Proposal((10,), "lookup 2")
    assert PromptLookup().propose([0, 0, *known], 1) == Proposal((10,), "lookup 2")
    assert PromptLookup().propose([*known[:2], 3, *known[2:]], 1) is None


def add(tree: SuffixTree, text: tuple[int, ...]) -> None:
    for start in range(len(text)):
        tree.add(text, start)


def counted(texts: list[tuple[int, ...]], last: tuple[int, ...]) -> Counter[int]:
    """What followed after `last` in the texts, and how often."""
    size = len(last)
    return Counter(
        text[start + size] for text in texts for start in range(len(text) - size) if text[start : start + size] == last
    )


def test_a_suffix_tree_proposes_the_most_frequent_continuation_of_what_it_holds() -> None:
    draw = random.Random(3)
    tree, texts = SuffixTree(), list[tuple[int, ...]]()
    for turn in range(200):
        if texts and draw.random() < 0.4:
            gone = texts.pop(draw.randrange(len(texts)))
            for start in range(len(gone)):
                tree.remove(gone, start)
        else:
            texts.append(tuple(draw.choices(range(3), k=draw.randint(1, 30))))
            add(tree, texts[-1])
        assert tree.nodes == nodes_of(tree)
        if turn % 5 or not texts:
            continue
        text = draw.choice(texts)
        start = draw.randrange(len(text))
        last = text[start : start + draw.randint(1, 6)]
        continuations, proposed = counted(texts, last), tree.continued(last, 1)
        if proposed:
            assert continuations[proposed[0]] == max(continuations.values())
        occurrences = sum(text[start : start + len(last)] == last for text in texts for start in range(len(text)))
        is_clear = bool(continuations) and max(continuations.values()) > LEAST_SHARE * occurrences
        assert bool(proposed) >= is_clear, "a clear continuation is proposed"
    for text in texts:
        for start in range(len(text)):
            tree.remove(text, start)
    assert not tree._root.children, "nothing is left of texts that were removed"
    assert tree.nodes == 1


def nodes_of(tree: SuffixTree) -> int:
    waiting, count = [tree._root], 0
    while waiting:
        node = waiting.pop()
        waiting += (node.children or {}).values()
        count += 1
    return count


def test_a_draft_of_several_tokens_is_made_of_the_most_frequent_continuations() -> None:
    draw = random.Random(7)
    texts = [tuple(draw.choices(range(2), k=40)) for _ in range(30)]
    tree = SuffixTree()
    for text in texts:
        add(tree, text)
    for _ in range(300):
        text = draw.choice(texts)
        start = draw.randrange(len(text) - 4)
        last = text[start : start + draw.randint(1, 4)]
        known = last
        for token in tree.continued(last, 6):
            continuations = counted(texts, known)
            assert continuations[token] == max(continuations.values())
            known = (*known, token)


def settled(answers: FinishedAnswers, texts: Iterable[Sequence[int]]) -> int:
    """Returns the bytes that answers take once all suffixes are in their trees, or out of them."""
    gc.collect()
    tracemalloc.start()
    try:
        for number, text in enumerate(texts):
            answers.add(bytes([number % 2]), text)
            while answers._coming or answers._leaving:
                answers.tree(b"")
                assert answers.nodes <= answers._most_nodes
        assert answers.nodes == sum(each.tree.nodes for each in answers._by_salt.values())
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_answer_that_comes_again_adds_nothing_but_its_tokens() -> None:
    draw = random.Random(1)
    text = draw.choices(range(50_000), k=400)
    once = settled(FinishedAnswers(), [text] * 2)
    again = settled(FinishedAnswers(), [text] * 12)
    assert again < once + 10 * (4 * len(text) + 1000)


@pytest.mark.parametrize("words", [2, 50, 50_000])
@pytest.mark.parametrize("copies", [1, 2])
def test_answers_take_no_more_memory_than_they_may(words: int, copies: int) -> None:
    draw, most = random.Random(words), 100_000
    texts = (text for _ in range(8) for text in [draw.choices(range(words), k=100)] * copies)
    answers = FinishedAnswers(most_bytes=most)
    assert settled(answers, texts) < 1.1 * most
    assert len(answers._kept) > 1, "what there is room for is kept"


def test_a_draft_goes_on_beyond_the_depth_of_the_tree() -> None:
    tree = SuffixTree()
    add(tree, tuple(range(100)))
    assert tree.continued([10, 11, 12, 13], 3 * DEPTH) == list(range(14, 14 + 3 * DEPTH))


def test_answers_are_proposed_to_requests_with_the_same_salt_alone() -> None:
    answers = FinishedAnswers()
    answers.add(b"one", range(20))
    assert AnswerSuffixes(answers, b"two").propose([*range(8)], 4) is None
    proposal = AnswerSuffixes(answers, b"one").propose([*range(8)], 4)
    assert proposal == Proposal((8, 9, 10, 11), "suffix 8")


def test_the_oldest_answers_go_and_leave_nothing() -> None:
    answers = FinishedAnswers(most_tokens=100 + 3 * OWN_TOKENS)
    for number in range(50):
        answers.add(bytes([number % 3]), range(number, number + 30))
    assert answers._tokens <= answers._most_tokens
    assert sum(each.answers for each in answers._by_salt.values()) == len(answers._kept) == 3
    assert set(answers._by_salt) == {each.salt for each in answers._kept}
    for number in range(50, 60):
        answers.add(b"", range(number, number + 10))
        while answers._coming or answers._leaving:
            answers.tree(b"")
    (tree,) = [each.tree for each in answers._by_salt.values()]
    assert tree._root.children is not None
    assert set(tree._root.children) == {token for each in answers._kept for token in each.tokens}


@pytest.mark.parametrize("length", [1, 600])
def test_answers_that_nobody_asks_for_are_kept_within_the_same_bounds(length: int) -> None:
    answers = FinishedAnswers(most_tokens=2000)
    for number in range(3000):
        answers.add(bytes([number % 5]), range(length))
        assert len(answers._coming) <= len(answers._kept)
        waiting = sum(each.taken - each.removed for each in answers._leaving)
        assert waiting <= 2000
    assert len(answers._kept) == 2000 // (length + OWN_TOKENS)


def test_a_long_answer_is_taken_in_over_several_proposals() -> None:
    answers = FinishedAnswers()
    answers.add(b"", range(5 * SUFFIXES_AT_ONCE))  # as it comes, it takes in the first ones
    drafter = AnswerSuffixes(answers, b"")
    last = [*range(4 * SUFFIXES_AT_ONCE + 1, 4 * SUFFIXES_AT_ONCE + 5)]
    assert [drafter.propose(last, 1) is not None for _ in range(4)] == [False, False, False, True]


def test_of_thousands_of_continuations_a_few_are_looked_at() -> None:
    tree = SuffixTree()
    for token in [*range(10, 10 + 4 * MOST_LOOKED_AT), *[5] * 10 * MOST_LOOKED_AT]:
        add(tree, (1, 2, token))
    assert tree.continued([1, 2], 1) == [], "the frequent one came too late"


def test_a_prompt_of_one_token_is_looked_up_at_a_few_places_and_kept_as_far_as_it_is_searched() -> None:
    lookup = PromptLookup()
    known = [7] * (4 * REACH)
    for _ in range(3):
        assert lookup.propose(known, 4) == Proposal((7, 7, 7, 7), "lookup 8")
        known.append(7)
    assert len(lookup._tokens) <= 2 * REACH + 2
    long = [*range(1000), *range(REACH), 101, 102, 103]
    grown = PromptLookup()
    for end in range(len(long) - 3, len(long) + 1):
        proposal = grown.propose(long[:end], 2)
    assert proposal == PromptLookup().propose(long, 2) == Proposal((104, 105), "lookup 2")
