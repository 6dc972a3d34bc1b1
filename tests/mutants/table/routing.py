"""Routing: turns and limits, prices, reservations, and streams that are taken over."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="turns-are-free",
        claim="one tenant's flood does not starve another tenant",
        file="router/admission/fair_queue.py",
        old="tenant.served_s = max(tenant.served_s, least_s) + entry.cost_s",
        new="tenant.served_s = max(tenant.served_s, least_s)",
        test=(
            "tests/unit/router/admission/test_fair_queue.py::test_tenants_take_queue_and_a_newcomer_gains_nothing_by_its_absence"
        ),
    ),
    Mutant(
        name="overdrawn-is-forgotten",
        claim="a tenant that sends one after the other gets no extra turns",
        file="router/admission/fair_queue.py",
        old="return max(self.round_begin_s, self.overdrawn_s.get(name, 0.0))",
        new="return self.round_begin_s",
        test=(
            "tests/unit/router/admission/test_fair_queue.py::test_who_keeps_a_single_request_waiting_gets_no_more_than_its_share"
        ),
    ),
    Mutant(
        name="full-queue-keeps-the-flood",
        claim="a full queue makes room for tenants below their share",
        file="router/admission/fair_queue.py",
        old="if own + 1 > share:",
        new="if own + 1 > 0:",
        test=(
            "tests/unit/router/admission/test_fair_queue.py::test_who_holds_less_than_its_share_takes_a_place_of_who_holds_more"
        ),
    ),
    Mutant(
        name="urgency-is-ignored",
        claim="a tenant's own requests go earliest limit first",
        file="router/admission/fair_queue.py",
        old="return (request.siblings.before // SIBLINGS_AT_ONCE, *request.urgency, order)",
        new="return (request.siblings.before // SIBLINGS_AT_ONCE, 0.0, 0.0, order)",
        test="tests/unit/router/admission/test_fair_queue.py::test_a_tenants_own_go_by_limit_then_by_arrival",
    ),
    Mutant(
        name="siblings-go-at-once",
        claim="the choices of one request let others pass",
        file="router/admission/fair_queue.py",
        old="return (request.siblings.before // SIBLINGS_AT_ONCE, *request.urgency, order)",
        new="return (0, *request.urgency, order)",
        test=(
            "tests/unit/router/admission/test_fair_queue.py::test_many_answers_of_one_request_let_what_comes_later_pass"
        ),
    ),
    Mutant(
        name="slots-of-one-tenant",
        claim="one tenant's long answers leave slots to others",
        file="router/admission/capacity.py",
        old="< max(1.0, MOST_SLOTS * slots)",
        new="<= max(1.0, slots)",
        test=(
            "tests/unit/router/admission/test_admission.py::test_one_claimants_long_answers_leave_slots_to_others_until_they_end"
        ),
    ),
    Mutant(
        name="late-requests-wait",
        claim="a request that would come too late is told so",
        file="router/admission/admission.py",
        old="if latest_start_s is None or latest_start_s > now_s:",
        new="if latest_start_s is None or latest_start_s > now_s - 1e9:",
        test=(
            "tests/unit/router/admission/test_admission_refusals.py::test_a_held_one_is_refused_when_it_can_no_longer_make_it"
        ),
    ),
    Mutant(
        name="seconds-cost-the-same",
        claim="a second near saturation costs more",
        file="router/routing/policies/priced.py",
        old="return 1 / (1 - min(utilisation, self._prices.max_utilisation))",
        new="return 1.0",
        test=(
            "tests/unit/router/routing/test_priced.py::test_a_second_of_prefill_costs_the_more_the_busier_prefill_workers_are"
        ),
    ),
    Mutant(
        name="harm-is-free",
        claim="requests go where they cost everybody the fewest seconds",
        file="router/routing/policies/priced.py",
        old="return delay_s * self._prices.harm_per_stream",
        new="return 0.0 * delay_s",
        test="tests/unit/router/routing/test_priced.py::test_over_a_slow_wire_it_is_computed",
    ),
    Mutant(
        name="eviction-is-free",
        claim="ties go to the least cache damage",
        file="router/routing/policies/priced.py",
        old="return max(0, min(new_pages - view.pages_free, view.pages_cached))",
        new="return 0",
        test="tests/unit/router/routing/test_priced.py::test_evictions_that_are_counted_cost_seconds",
    ),
    Mutant(
        name="keys-meet-nowhere",
        claim="requests of one cache key meet at one worker",
        file="router/routing/policies/priced.py",
        old="return hashlib.blake2b(view.worker.encode(), key=key, digest_size=8).digest()",
        new="return hashlib.blake2b(view.worker.encode(), digest_size=8).digest()",
        test="tests/unit/router/routing/test_policies.py::test_requests_with_one_key_meet_and_other_keys_spread",
    ),
    Mutant(
        name="reservations-end-early",
        claim="routers tell each other what they have placed: it counts until a report shows it",
        file="router/routing/reservations.py",
        old="opened_at_s + REPORT_LAG_S <= now_s",
        new="opened_at_s <= now_s",
        test=("tests/unit/router/routing/test_reservations.py::test_what_is_placed_counts_until_a_report_must_show_it"),
    ),
    Mutant(
        name="reservations-stay",
        claim="what was placed counts once",
        file="router/routing/reservations.py",
        old="reserved.add(share, -1)",
        new="pass",
        test=(
            "tests/unit/router/routing/test_reservations.py::test_what_one_request_had_reserved_ends_with_it_and_nothing_else_does"
        ),
    ),
    Mutant(
        name="lost-routers-count",
        claim="a lost router's placements count for a moment only",
        file="router/routing/reservations.py",
        old="foreign.lost_at_s + LOST_GRACE_S <= now_s",
        new="foreign.lost_at_s + 1e9 <= now_s",
        test=(
            "tests/unit/router/routing/test_shared_reservations.py::test_a_lost_router_is_believed_for_a_moment_and_a_returning_one_tells_all_anew"
        ),
    ),
    Mutant(
        name="coming-blocks-of-one",
        claim="requests of a burst go where their common prefix is on its way",
        file="router/routing/reservations.py",
        old="coming[worker] = coming.get(worker, 0) + 1",
        new="coming[worker] = 1",
        test=(
            "tests/unit/router/routing/test_reservations.py::test_blocks_are_coming_until_the_last_request_for_them_has_ended"
        ),
    ),
    Mutant(
        name="recovered-of-another-request",
        claim="a stream is not resumed with another request's answer",
        file="router/serving/recovery.py",
        old="if found.prompt != wanted.prompt or not _is_same(found.sampling, wanted.sampling):",
        new="if found.prompt != wanted.prompt:",
        test=(
            "tests/unit/router/serving/test_recovered_answers.py::test_an_answer_to_other_sampling_is_no_answer_to_this_request"
        ),
    ),
    Mutant(
        name="recovered-of-another-prompt",
        claim="a stream is not resumed with another request's answer",
        file="router/serving/recovery.py",
        old="if found.prompt != wanted.prompt or",
        new="if len(found.prompt) != len(wanted.prompt) or",
        test=(
            "tests/unit/router/serving/test_recovered_answers.py::test_an_answer_to_another_prompt_is_no_answer_to_this_request"
        ),
    ),
    Mutant(
        name="earlier-attempt-wins",
        claim="a resumed stream goes on with the latest attempt",
        file="router/serving/recovery.py",
        old="return recovered.attempt, len(recovered.tokens)",
        new="return -recovered.attempt, len(recovered.tokens)",
        test=(
            "tests/unit/router/serving/test_recovered_answers.py::test_the_latest_attempt_is_taken_over_and_of_one_that_moved_the_longer_answer"
        ),
    ),
    Mutant(
        name="hashes-of-the-answer-without-salt",
        claim="tenants do not see each other's answers, also after a worker's death",
        file="router/serving/choice_state.py",
        old="extend_hashes(self._block_hashes, known, self._block_size, request.salt, request.public_blocks)",
        new="extend_hashes(self._block_hashes, known, self._block_size)",
        test=(
            "tests/unit/router/serving/test_recovery.py::test_an_answer_goes_on_elsewhere_when_its_decode_worker_dies"
        ),
    ),
    Mutant(
        name="request-that-kills-goes-on",
        claim="a request that no engine can compute ends alone",
        file="router/serving/choice_state.py",
        old="if self.failed_steps == MOST_FAILED_STEPS:",
        new="if self.failed_steps == 100:",
        test=(
            "tests/unit/router/serving/test_dispatch_failures.py::test_a_request_that_two_workers_cannot_compute_is_nobodys_third_failure"
        ),
    ),
    Mutant(
        name="turns-saved-without-end",
        claim="one tenant's flood does not starve another one, also one that its worker kept waiting",
        file="router/admission/fair_queue.py",
        old="tenant.served_s = max(tenant.served_s, least_s) + entry.cost_s",
        new="tenant.served_s += entry.cost_s",
        test=(
            "tests/unit/router/admission/test_fair_queue.py::test_a_tenant_whose_worker_was_busy_keeps_a_few_turns_and_not_all_that_it_missed"
        ),
    ),
    Mutant(
        name="best-holder-has-no-peer",
        claim="prefixes are fetched where that is the cheapest: a slow disk of one's own is passed by",
        file="router/routing/policies/priced.py",
        old="best.append(holding[:2])",
        new="best.append(holding[:1])",
        test=(
            "tests/unit/router/routing/test_priced.py::test_who_holds_most_on_a_slow_disk_fetches_from_the_next_best_holder"
        ),
    ),
    Mutant(
        name="arrivals-fall",
        claim="counts of workers follow the load of all routers",
        file="cluster/supervisor/reconcile/autoscaler.py",
        old="self._arrived += max(0, report.arrived - known.arrived)",
        new="self._arrived += report.arrived - known.arrived",
        test=(
            "tests/unit/cluster/supervisor/reconcile/test_autoscaler.py::test_arrivals_are_those_of_all_routers_and_never_fall"
        ),
    ),
)
