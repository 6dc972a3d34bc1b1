"""From logits to tokens: noise, penalties, truncation, grammars, and logprobs."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="noise-without-choice",
        claim="choices of one request differ",
        file="twostroke/engine/sampling/noise.py",
        old="state = _mix((state ^ choice) + _GOLDEN & _MASK)",
        new="state = _mix(state + _GOLDEN & _MASK)",
        test="tests/unit/engine/sampling/test_sampler.py::test_seed_choice_and_position_each_change_the_draw",
    ),
    Mutant(
        name="noise-without-position",
        claim="seeded sampling is a function of seed, choice and position",
        file="twostroke/engine/sampling/noise.py",
        old="return _mix((state ^ position) + _GOLDEN & _MASK)",
        new="return _mix(state + _GOLDEN & _MASK)",
        test="tests/unit/engine/sampling/test_sampler.py::test_seed_choice_and_position_each_change_the_draw",
    ),
    Mutant(
        name="noise-of-32-bit-seeds",
        claim="all 64 bits of a seed count",
        file="twostroke/engine/sampling/noise.py",
        old="state = _mix((seed + _GOLDEN) & _MASK)",
        new="state = _mix(((seed & 0xFFFFFFFF) + _GOLDEN) & _MASK)",
        test=(
            "tests/unit/engine/sampling/test_sampler.py::test_noise_of_the_greatest_and_least_numbers_is_finite_and_a_banned_token_never_wins"
        ),
    ),
    Mutant(
        name="noise-of-16-bit-tokens",
        claim="noise differs from token to token beyond 65,536",
        file="twostroke/engine/sampling/noise.py",
        old="return _gumbel(tokens * _signed(_GOLDEN) + stream_of(seed, choice, position))",
        new="return _gumbel(tokens % (1 << 16) * _signed(_GOLDEN) + stream_of(seed, choice, position))",
        test="tests/unit/engine/sampling/test_sampler.py::test_every_token_of_a_large_vocabulary_has_noise_of_its_own",
    ),
    Mutant(
        name="noise-of-places",
        claim="with a grammar each token has its own noise",
        file="twostroke/engine/sampling/sampler.py",
        old="tokens = torch.from_numpy(kept if ids is None else ids[kept])",
        new="tokens = torch.from_numpy(kept)",
        test=(
            "tests/unit/engine/sampling/test_sampler.py::test_with_a_grammar_a_token_has_the_noise_that_it_has_without_one"
        ),
    ),
    Mutant(
        name="frequency-over-the-prompt",
        claim="frequency and presence penalties count the answer alone",
        file="twostroke/engine/sampling/sampler.py",
        old="counts = Counter(row.output)",
        new="counts = Counter((*row.prompt, *row.output))",
        test="tests/unit/engine/sampling/test_sampler.py::test_presence_and_frequency_penalties_count_the_answer_only",
    ),
    Mutant(
        name="repetition-of-the-answer-alone",
        claim="the repetition penalty counts prompt and answer",
        file="twostroke/engine/sampling/sampler.py",
        old="seen = _tensor(sorted({*row.prompt, *row.output}))",
        new="seen = _tensor(sorted({*row.output}))",
        test="tests/unit/engine/sampling/test_sampler.py::test_repetition_penalty_counts_prompt_and_answer",
    ),
    Mutant(
        name="repetition-of-negative-logits",
        claim="the repetition penalty makes negative logits smaller",
        file="twostroke/engine/sampling/sampler.py",
        old="torch.where(values > 0, values / penalty, values * penalty)",
        new="values / penalty",
        test="tests/unit/engine/sampling/test_sampler.py::test_repetition_penalty_counts_prompt_and_answer",
    ),
    Mutant(
        name="nucleus-without-its-last",
        claim="top_p keeps the token that reaches it",
        file="twostroke/engine/sampling/sampler.py",
        old="count = int(np.searchsorted(mass, top_p * mass[-1])) + 1",
        new="count = max(1, int(np.searchsorted(mass, top_p * mass[-1])))",
        test=(
            "tests/unit/engine/sampling/test_sampler.py::test_the_nucleus_has_the_token_that_reaches_its_share_and_none_behind_it"
        ),
    ),
    Mutant(
        name="nucleus-before-top-k",
        claim="top_k comes before top_p",
        file="twostroke/engine/sampling/sampler.py",
        old="kept = kept[_nucleus(scaled[kept], params.top_p)]",
        new="kept = np.intersect1d(kept, _nucleus(scaled, params.top_p))",
        test="tests/unit/engine/sampling/test_sampler.py::test_top_p_counts_within_top_k",
    ),
    Mutant(
        name="top-k-with-ties",
        claim="of equal tokens at the edge of top_k the lowest stay",
        file="twostroke/engine/sampling/sampler.py",
        old="return np.concatenate((above, equal[: count - len(above)]))",
        new="return np.concatenate((above, equal))",
        test="tests/unit/engine/sampling/test_sampler.py::test_equals_at_the_edge_are_ranked_by_id",
    ),
    Mutant(
        name="min-p-of-the-mean",
        claim="min_p is a share of the likeliest token's probability",
        file="twostroke/engine/sampling/sampler.py",
        old="kept = np.flatnonzero(scaled >= scaled.max() + math.log(params.min_p))",
        new="kept = np.flatnonzero(scaled >= scaled.max() + math.log(params.min_p) / 2)",
        test="tests/unit/engine/sampling/test_sampler.py::test_min_p_drops_what_is_much_less_likely_than_the_best",
    ),
    Mutant(
        name="logprobs-after-temperature",
        claim="logprobs are those before temperature",
        file="twostroke/engine/sampling/sampler.py",
        old="logprobs = logits.log_softmax(dim=-1).numpy(force=True)",
        new="logprobs = (logits / max(params.temperature, 0.01)).log_softmax(dim=-1).numpy(force=True)",
        test="tests/unit/engine/sampling/test_sampler.py::test_presence_and_frequency_penalties_count_the_answer_only",
    ),
    Mutant(
        name="overflow-draws-a-token",
        claim="a row whose numbers are not finite ends alone",
        file="twostroke/engine/sampling/sampler.py",
        old="if not math.isfinite(value):",
        new="if math.isnan(value):",
        test=(
            "tests/unit/engine/sampling/test_sampler.py::test_logits_that_overflow_when_they_are_divided_by_the_temperature_have_no_token"
        ),
    ),
    Mutant(
        name="bans-end-grammars",
        claim="a grammar that has ended ends the answer, before min_tokens too",
        file="twostroke/base/token_mask.py",
        old="return left if len(left) else ids",
        new="return left",
        test="tests/unit/engine/sampling/test_sampler.py::test_a_token_that_alone_may_come_is_drawn_whatever_its_logit",
    ),
    Mutant(
        name="mask-of-16-bit-tokens",
        claim="no answer violates its schema: every token of the vocabulary is masked",
        file="twostroke/base/token_mask.py",
        old='return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=size))',
        new=('return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=min(size, 1 << 16)))'),
        test=(
            "tests/unit/grammar/test_state.py::test_a_mask_permits_tokens_of_large_vocabularies_and_none_behind_their_end"
        ),
    ),
    Mutant(
        name="mask-bits-reversed",
        claim="no answer violates its schema: a mask's lowest bit is its lowest token",
        file="twostroke/base/token_mask.py",
        old='bitorder="little", count=size',
        new='bitorder="big", count=size',
        test="tests/unit/grammar/test_state.py::test_only_what_the_grammar_permits_is_in_the_mask",
    ),
    Mutant(
        name="prompt-ranks",
        claim="the ranks of prompt logprobs count from 1",
        file="twostroke/engine/sampling/prompt_scores.py",
        old="places = (logprobs > chosen).sum(dim=-1) + 1",
        new="places = (logprobs >= chosen).sum(dim=-1) + 1",
        test="tests/unit/engine/sampling/test_prompt_scores.py::test_they_are_those_of_transformers_over_the_whole_prompt",
    ),
    Mutant(
        name="prompt-scores-of-16-rows",
        claim="prompts of any length have logprobs for each token",
        file="twostroke/engine/sampling/prompt_scores.py",
        old="_piece(logits[piece].float(), targets[piece], row.top)",
        new="_piece(logits[piece].float(), targets[: len(targets[piece])], row.top)",
        test="tests/unit/engine/sampling/test_prompt_scores.py::test_they_are_those_of_transformers_over_the_whole_prompt",
    ),
    Mutant(
        name="drafts-of-another-seed",
        claim="a draft model draws with the noise of the answer",
        file="twostroke/scheduler/constraints/draft_rows.py",
        old="SampleRow(number, row.params, int(end), mask=",
        new="SampleRow(number, row.params, int(end) + 1, mask=",
        test=(
            "tests/unit/scheduler/test_draft_rows.py::test_a_drafted_token_is_drawn_at_the_position_at_which_the_answer_would_draw_it"
        ),
    ),
    Mutant(
        name="digits-of-proposals-from-zero",
        claim="speculation changes no token of an answer with a grammar",
        file="twostroke/grammar/state.py",
        old="copy._renewed_at, copy._digits = self._renewed_at, self._digits",
        new="copy._renewed_at = self._renewed_at",
        test=("tests/unit/grammar/test_digits.py::test_what_is_bounded_depends_on_the_text_alone"),
    ),
)
