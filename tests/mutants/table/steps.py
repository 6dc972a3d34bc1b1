"""Steps: what is computed next and written where, how answers go on, and how they end."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="tables-of-128-pages",
        claim="prompts longer than every internal step have the tokens of greedy generate",
        file="twostroke/scheduler/batching.py",
        old="tables[row, known[row] : used[row]] = pages[row][known[row] : used[row]]",
        new=("tables[row, known[row] : min(used[row], 128)] = pages[row][known[row] : min(used[row], 128)]"),
        test=("tests/unit/scheduler/test_page_tables.py::test_a_long_prompt_and_a_long_answer_have_all_of_their_pages"),
    ),
    Mutant(
        name="tables-of-the-step-before",
        claim="each step reads the pages of its own sequences",
        file="twostroke/scheduler/batching.py",
        old="and all(map(is_, pages, self._pages)) and",
        new="and",
        test=(
            "tests/unit/scheduler/test_page_tables.py::test_tables_of_the_step_before_are_used_again_by_the_same_sequences_alone"
        ),
    ),
    Mutant(
        name="computed-tokens-are-written-again",
        claim="a step writes to no block that others read",
        file="twostroke/scheduler/batching.py",
        old="slots[positions < kept[rows]] = self._scratch_slot",
        new="slots[positions < 0] = self._scratch_slot",
        test=(
            "tests/unit/scheduler/test_scheduler.py::test_a_prompt_whose_blocks_are_all_here_reruns_its_last_token_alone_and_writes_nothing"
        ),
    ),
    Mutant(
        name="position-of-drafts",
        claim="speculation changes no token: each is drawn at its own position",
        file="twostroke/scheduler/batching.py",
        old="SampleRow(row, params, known + drawn, banned",
        new="SampleRow(row, params, known, banned",
        test=("tests/unit/scheduler/test_drafting.py::test_each_draw_is_as_if_the_drafted_tokens_before_it_were_known"),
    ),
    Mutant(
        name="penalties-see-all-drafts",
        claim="speculation changes no token: penalties see what is known at each place",
        file="twostroke/scheduler/batching.py",
        old="so_far = output[: answered + drawn] if proposed else output",
        new="so_far = output",
        test=("tests/unit/scheduler/test_drafting.py::test_each_draw_is_as_if_the_drafted_tokens_before_it_were_known"),
    ),
    Mutant(
        name="masks-of-the-first-draft",
        claim="speculation changes no token: each place has its own mask",
        file="twostroke/scheduler/batching.py",
        old="mask = allowed if masks is None else masks[drawn]",
        new="mask = allowed if masks is None else masks[0]",
        test=("tests/unit/scheduler/test_drafting.py::test_each_draw_is_as_if_the_drafted_tokens_before_it_were_known"),
    ),
    Mutant(
        name="min-tokens-of-drafts",
        claim="speculation changes no token: no end before min_tokens",
        file="twostroke/scheduler/batching.py",
        old="is_early = answered + drawn < params.min_tokens",
        new="is_early = answered < params.min_tokens",
        test=("tests/unit/scheduler/test_drafting.py::test_each_draw_is_as_if_the_drafted_tokens_before_it_were_known"),
    ),
    Mutant(
        name="wrong-drafts-are-kept",
        claim="drafted tokens are kept while the sampler draws the same",
        file="twostroke/scheduler/emission.py",
        old="if equal_tokens(emitted, drawn.proposed) < len(emitted):",
        new="if len(emitted) > len(drawn.proposed):",
        test=(
            "tests/unit/scheduler/test_emission.py::test_what_was_drawn_behind_a_wrong_draft_is_no_part_of_the_answer"
        ),
    ),
    Mutant(
        name="one-token-more",
        claim="max_tokens is the most tokens of an answer",
        file="twostroke/scheduler/emission.py",
        old="elif len(known) - sequence.prompt_tokens >= params.max_tokens",
        new="elif len(known) - sequence.prompt_tokens > params.max_tokens",
        test="tests/unit/scheduler/test_scheduler_answers.py::test_ignore_eos_goes_on_to_max_tokens",
    ),
    Mutant(
        name="ignored-eos-ends",
        claim="ignore_eos is honoured",
        file="twostroke/scheduler/emission.py",
        old="and (not params.ignore_eos or sequence.reader is not None)",
        new="",
        test="tests/unit/scheduler/test_scheduler_answers.py::test_ignore_eos_goes_on_to_max_tokens",
    ),
    Mutant(
        name="blocks-of-other-writers",
        claim="equal blocks are computed once",
        file="twostroke/kv_cache/groups/group_view.py",
        old="if record.filled or (record.writer is not None and record.writer != writer):",
        new="if record.filled:",
        test="tests/unit/scheduler/test_scheduler_pages.py::test_a_chunk_ends_before_a_block_that_a_pull_writes",
    ),
    Mutant(
        name="block-that-is-not-full-is-readable",
        claim="a block is readable when all of its tokens are computed",
        file="twostroke/scheduler/progress.py",
        old="first, last, pool = sequence.computed // size, end // size, self._pool",
        new=(
            "first, pool = sequence.computed // size, self._pool\n"
            "        last = min(-(-end // size), len(sequence.block_hashes))"
        ),
        test="tests/unit/scheduler/test_scheduler.py::test_a_long_prompt_is_computed_in_chunks_of_the_budget",
    ),
    Mutant(
        name="preempted-keeps-computed",
        claim="preemption changes no token: what lost its pages is computed again",
        file="twostroke/scheduler/scheduler.py",
        old="sequence.computed = sequence.claimable_at = 0",
        new="sequence.claimable_at = 0",
        test=(
            "tests/unit/scheduler/test_scheduler_pages.py::test_the_sequence_admitted_last_gives_its_pages_to_the_one_that_grows"
        ),
    ),
    Mutant(
        name="chunks-end-anywhere",
        claim="chunks end on block boundaries",
        file="twostroke/scheduler/choosing.py",
        old="end -= end % self._limits.block_size",
        new="pass",
        test=(
            "tests/unit/scheduler/test_scheduler.py::test_aligned_chunks_end_on_block_boundaries_whatever_the_budget_leaves"
        ),
    ),
    Mutant(
        name="passed-for-ever",
        claim="a request is passed by a bounded number of others",
        file="twostroke/scheduler/scheduler.py",
        old="if any(other.passes >= self._config.max_passes for other in passed):",
        new="if not passed and any(other.passes for other in passed):",
        test="tests/unit/scheduler/test_scheduler.py::test_a_short_one_may_pass_a_long_one_max_passes_times",
    ),
    Mutant(
        name="unsound-blocks-stay",
        claim="no cached block makes an answer fail",
        file="twostroke/scheduler/scheduler.py",
        old="self._pool.forget(pages)",
        new="pages.clear()",
        test=("tests/unit/scheduler/test_emission.py::test_blocks_of_an_answer_without_a_token_to_draw_are_forgotten"),
    ),
    Mutant(
        name="late-attempts-close",
        claim="a late Close of an earlier attempt ends nothing",
        file="decode_worker/request_manager.py",
        old="if state is not None and not self._is_late(state, attempt) and attempt <= state.attempt.number:",
        new="if state is not None and attempt <= state.attempt.number:",
        test=(
            "tests/unit/decode_worker/test_request_manager.py::test_closing_an_earlier_attempt_or_nothing_at_all_is_no_error_and_changes_nothing"
        ),
    ),
    Mutant(
        name="reattached-without-deadline",
        claim="a deadline ends a request everywhere, also behind another router",
        file="decode_worker/request_manager.py",
        old=("if not state.has_ended:\n            self._set_timer(state)"),
        new="pass",
        test="tests/unit/decode_worker/test_reattach.py::test_the_deadline_of_whoever_takes_over_counts",
    ),
    Mutant(
        name="tokens-sent-again",
        claim="a router that attaches gets each token once",
        file="decode_worker/output_stream.py",
        old="self._sent[state] = _Sent(position)",
        new="self._sent[state] = _Sent(0)",
        test=("tests/unit/decode_worker/test_output_stream.py::test_what_was_told_before_the_first_stream_is_not_lost"),
    ),
    Mutant(
        name="ended-requests-keep-pages",
        claim="a request that is cancelled holds nothing a step later",
        file="decode_worker/request_manager.py",
        old=("self._host.scheduler.end(state.sequence)\n        self._host.pulls.prune()"),
        new="self._host.scheduler.end(state.sequence)",
        test=(
            "tests/unit/worker/pulls/test_peer_faults.py::test_a_request_that_is_closed_during_a_fetch_frees_everything_everywhere"
        ),
    ),
    Mutant(
        name="budget-of-prompts",
        claim="prompts beside streams keep to the step's target",
        file="twostroke/scheduler/cost.py",
        old="left_s = self.step_s(streams, context_tokens) - own_s - cost.prompt_step_s",
        new="left_s = self.step_s(streams, context_tokens) - cost.prompt_step_s",
        test="tests/unit/scheduler/test_cost.py::test_what_streams_leave_of_the_target_goes_to_prompts",
    ),
    Mutant(
        name="proposal-that-was-wrong",
        claim="speculation learns from wrong proposals",
        file="twostroke/speculation/speculation.py",
        old="self._observe(proposal.kind, proposed == token)",
        new="self._observe(proposal.kind, True)",
        test=("tests/unit/speculation/test_speculation.py::test_chances_follow_what_became_of_proposals_of_the_kind"),
    ),
    Mutant(
        name="a-missing-branch-is-overlooked",
        claim="what asks for a branch is refused by name",
        file="twostroke/worker/answers.py",
        old="missing = asked.difference([branch.field for branch in branches])",
        new="missing = set[str]()",
        test=(
            "tests/unit/worker/test_branches.py::test_a_request_for_a_missing_branch_is_refused_with_its_field[grammar]"
        ),
    ),
    Mutant(
        name="earlier-deadline-stays",
        claim="a deadline is that of the router which has the request",
        file="decode_worker/request_manager.py",
        old=(
            "        if state.timer is not None:\n"
            "            state.timer.cancel()\n"
            "        if state.attempt.request.deadline_s is not None:"
        ),
        new="        if state.attempt.request.deadline_s is not None:",
        test=(
            "tests/unit/decode_worker/test_reattach.py::test_an_earlier_deadline_of_the_one_that_had_it_ends_nothing_any_more"
        ),
    ),
    Mutant(
        name="draft-in-place-of-the-last-token",
        claim="drafts end before the last token of an answer",
        file="twostroke/scheduler/constraints/drafting.py",
        old="limits.max_model_len - known) - 1",
        new="limits.max_model_len - known)",
        test=(
            "tests/unit/scheduler/test_drafting.py::test_drafts_leave_the_last_token_of_an_answer_and_of_the_context_to_a_draw"
        ),
    ),
    Mutant(
        name="pulls-of-closed-requests-go-on",
        claim="a request that is cancelled holds nothing",
        file="decode_worker/request_manager.py",
        old=("        self._host.scheduler.end(state.sequence)\n        self._host.pulls.prune()\n"),
        new="        self._host.scheduler.end(state.sequence)\n",
        test=(
            "tests/unit/decode_worker/test_request_manager.py::test_a_request_that_is_closed_while_its_pages_come_is_pulled_no_further"
        ),
    ),
    Mutant(
        name="deadline-outlives-its-answer",
        claim="an answer that has ended stays as it is",
        file="decode_worker/request_manager.py",
        old=("        if state.timer is not None:\n            state.timer.cancel()\n        grace_s"),
        new="        grace_s",
        test=(
            "tests/unit/decode_worker/test_request_manager.py::test_the_deadline_of_an_answer_that_has_ended_changes_nothing"
        ),
    ),
    Mutant(
        name="probe-of-windows-reads-others",
        claim="a step that fails once is run again, also with windows",
        file="twostroke/scheduler/windows/places.py",
        old="np.where(is_scratch, np.int32(window.slots), batch.block_tables % np.int32(window.slots))",
        new="np.where(is_scratch, np.int32(0), batch.block_tables % np.int32(window.slots))",
        test="tests/unit/worker/steps/test_loop.py::test_a_step_that_fails_once_is_run_again",
    ),
    Mutant(
        name="asks-what-is-being-read",
        claim="whoever proposes, no answer changes and no worker ends",
        file="twostroke/worker/drafts/model_drafts.py",
        old="running = [each for each in scheduler.running_sequences if not scheduler.is_being_read(each)]",
        new="running = list(scheduler.running_sequences)",
        test=(
            "tests/unit/worker/drafts/test_model_drafts.py::test_an_answer_that_is_being_read_on_another_thread_is_not_asked_for_proposals"
        ),
    ),
)
