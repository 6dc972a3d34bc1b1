"""The life of a scheduler as a state machine: what can happen to it, and what has to hold after each of it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.unit.scheduler.derived import check_kept
from tests.unit.scheduler.features import grammar_of, match, released_pages, score, scores_found
from tests.unit.scheduler.history_begin import MAX_MODEL_LEN, BegunHistory, Flight, Pull
from tests.unit.scheduler.symbolic import (
    COMPILER,
    GARBAGE,
    GRAMMARS,
    ExactRunner,
    GuessingDrafter,
    answer_alone,
    answering,
    logprob_of,
    prefilling,
    pulling,
    scores_of,
)
from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part, blocks_of
from twostroke.request import FinishReason, Grammar, SamplingParams
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence
from twostroke.speculation.draft import Drafter
from twostroke.speculation.drafters import ForcedTokens
from twostroke.speculation.speculation import Acceptance, Speculation

MAX_TURNS = 3000
"""Far more than any of these histories needs to come to rest."""

picks = st.integers(0, 10**6)


class SchedulerHistory(BegunHistory):
    # Work comes in

    @rule(
        pick=picks,
        cut=st.integers(0, 30),
        more=st.lists(st.integers(0, 1), max_size=9),
        max_tokens=st.integers(1, 9),
        min_tokens=st.integers(0, 4),
        seed=st.integers(0, 2),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (3,)]),
        pulled=st.integers(0, 8),
        scored=st.booleans(),
        wrong=st.integers(1, 6),
        grammar=st.none() | st.sampled_from(GRAMMARS),
        logprobs=st.none() | st.just(0),
    )
    def ask(  # noqa: PLR0917  # hypothesis draws each
        self,
        pick: int,
        cut: int,
        more: list[int],
        max_tokens: int,
        min_tokens: int,
        seed: int,
        ignore_eos: bool,
        stop: tuple[int, ...],
        pulled: int = 8,
        scored: bool = False,
        wrong: int = 3,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> None:
        prompt = [*self.texts[pick % len(self.texts)][:cut], *more]
        if not prompt or len(prompt) >= MAX_MODEL_LEN or not self.fits(len(prompt) + max_tokens):
            return
        params = SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            logprobs=logprobs,
            prompt_logprobs=0,
        )
        sequence = answering(self.number(), prompt, params, self.block_size)
        if grammar is not None:
            self.grammars[sequence] = grammar
            match(sequence, COMPILER.state(grammar), self.block_size)
        sequence.pulled_blocks = min(pulled, len(sequence.block_hashes)) if self.pool.others else 0
        if scored and len(prompt) > 1:
            score(sequence)
            self.scored.add(sequence)
        sequence.proposer = speculation_of(sequence, wrong)
        self.texts.append(prompt)
        self.answers[sequence] = []
        self.live.append(sequence)
        self.scheduler.enqueue(sequence)

    @rule(pick=picks, cut=st.integers(0, 30), more=st.lists(st.integers(0, 1), max_size=9))
    def ask_for_pages(self, pick: int, cut: int, more: list[int]) -> None:
        job = prefilling(self.number(), [*self.texts[pick % len(self.texts)][:cut], *more], self.block_size)
        if not job.block_hashes or not self.fits(len(job.known)):
            return
        self.texts.append(list(job.known))
        self.live.append(job)
        self.scheduler.enqueue(job)

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def resume_elsewhere(self, pick: int) -> None:
        """A worker is lost, and another one goes on after the tokens that were emitted: here it is this one again."""
        sequence = self.live[pick % len(self.live)]
        emitted = self.answers.get(sequence)
        if not emitted or sequence in self.scored or sequence.sampling is None:
            return
        self.scheduler.end(sequence)
        self.live.remove(sequence)
        known = [*sequence.known[: sequence.prompt_tokens], *emitted]
        resumed = answering(self.number(), known, sequence.sampling, self.block_size)
        resumed.prompt_tokens = sequence.prompt_tokens
        if sequence in self.grammars:
            self.grammars[resumed] = self.grammars[sequence]
            match(resumed, COMPILER.state(self.grammars[sequence], emitted), self.block_size)
            self.seen["answer with a grammar resumed"] += 1
        self.answers[resumed] = emitted
        self.live.append(resumed)
        self.scheduler.enqueue(resumed)

    @precondition(lambda self: self.live)
    @rule(pick=picks, wrong=st.integers(0, 6))
    def switch_speculation(self, pick: int, wrong: int) -> None:
        """An answer gets other drafters, or none, also while drafts of the earlier ones run."""
        sequence = self.live[pick % len(self.live)]
        if sequence.sampling is not None:
            sequence.proposer = speculation_of(sequence, wrong)
            self.seen["speculation switched"] += 1

    # Work is done

    @rule(pull=st.lists(st.booleans(), min_size=1, max_size=5))
    def admit(self, pull: list[bool]) -> None:
        """Also while a step is in flight."""
        for admission in self.scheduler.admit():
            self.begin_pull(admission, pull)

    def begin_pull(self, admission: AdmittedSequence, pull: list[bool]) -> None:
        sequence = admission.sequence
        self.learn(sequence.known, sequence.block_hashes)
        assert all(
            self.pool.groups[part.group].is_unwritten(page)
            for part, page in sequence.pages_of(admission.missing).items()
        )
        self.write(sequence, [part for part in admission.missing if pull[part.block % len(pull)]])

    def write(self, sequence: Sequence, missing: list[Part]) -> None:
        """A pull writes these parts."""
        pages, parts = blocks_of(missing, GroupKind.FULL), blocks_of(missing, GroupKind.FURTHER)
        if not missing:
            return
        session, hashes = pulling(self.number()), sequence.block_hashes
        for index in pages:
            self.pool.assign_writer(sequence.pages[index], session)
        slots = {} if sequence.further is None else {sequence.further.slots[index]: hashes[index] for index in parts}
        for slot in slots:
            self.windows.assign_writer(slot, session)
        self.pulls.append(Pull(session, {sequence.pages[index]: hashes[index] for index in pages}, slots))

    @precondition(lambda self: self.live)
    @rule(pick=picks, depth=st.integers(1, 8))
    def pull_again(self, pick: int, depth: int) -> None:
        """A page source has failed, and a peer holds the first blocks."""
        sequence = self.live[pick % len(self.live)]
        depth = min(depth, len(sequence.block_hashes))
        if sequence.pages and depth:
            self.write(sequence, self.scheduler.pull_to(sequence, depth))

    @precondition(lambda self: self.flight is None)
    @rule(runs_at_once=st.booleans())
    def begin_step(self, runs_at_once: bool) -> None:
        step = self.scheduler.plan(self.beside)
        for sequence in self.scheduler.take_preempted():
            assert not sequence.pages
            self.seen["preempted"] += 1
        if step is None:
            return
        budget = self.scheduler._config.max_num_batched_tokens
        again = max(each.sequence.computed - each.start for each in step.chunks)
        over = max(0, again - 1)  # a block that runs again is not cut, and is the last that is chosen
        assert 0 < len(step.batch.tokens) <= budget + over
        streams = [chunk for chunk in step.chunks if chunk.samples and chunk.end - chunk.start == 1]
        if self.beside is not None and streams:
            beside = sum(
                chunk.end - chunk.start
                for chunk in step.chunks
                if chunk.end - chunk.start == 1 or self.is_forced_run(chunk.sequence, chunk.start)
            )
            drafted = step.batch.proposed_tokens
            assert len(step.batch.tokens) - drafted - beside <= self.beside.most_prompt_tokens + over
        for chunk in step.chunks:
            state = grammar_of(chunk.sequence)
            run = () if state is None else tuple(state.forced_run(len(chunk.proposed)))
            self.seen["forced tokens drafted"] += bool(run) and chunk.proposed[: len(run)] == run
        self.flight = Flight(step)
        if runs_at_once:
            self.runner.write(step)
            self.flight.result = self.runner.attend(step)

    def is_forced_run(self, sequence: Sequence, start: int) -> bool:
        """Forced tokens of a block and fewer take no other's share, as streams do not."""
        is_answer = sequence in self.grammars and start >= sequence.prompt_tokens
        return is_answer and len(sequence.known) - start <= self.block_size

    @precondition(lambda self: self.flight is not None)
    @rule()
    def end_step(self) -> None:
        assert self.flight is not None
        step, result = self.flight.step, self.flight.result
        self.flight = None
        if result is None:
            self.runner.write(step)
        result = self.runner.attend(step)
        known = [len(chunk.sequence.known) for chunk in step.chunks]
        for emission in self.scheduler.update(step, result):
            sequence = emission.sequence
            assert sequence.sampling is not None
            if sequence.sampling.logprobs is not None:
                seen = [*sequence.known[: sequence.prompt_tokens], *self.answers[sequence]]
                assert emission.token.logprob == logprob_of(seen, emission.token.token)
            self.answers[sequence].append(emission.token.token)
            self.check_answer(sequence, emission.finish)
        for chunk, before in zip(step.chunks, known, strict=True):
            self.learn(chunk.sequence.known, chunk.sequence.block_hashes)
            if chunk.proposed and not chunk.sequence.ended:
                is_right = len(chunk.sequence.known) > before + len(chunk.proposed)
                self.seen["all drafted tokens right" if is_right else "a drafted token wrong"] += 1

    def check_answer(self, sequence: Sequence, finish: FinishReason | None) -> None:
        assert sequence.sampling is not None
        prompt = sequence.known[: sequence.prompt_tokens]
        answer, reason = answer_alone(prompt, sequence.sampling, MAX_MODEL_LEN, self.grammars.get(sequence))
        so_far = self.answers[sequence]
        assert so_far == answer[: len(so_far)]
        if sequence in self.scored:
            assert scores_found(sequence) == scores_of(prompt[:-1], prompt[1:], 0)
            self.seen["prompt scored after preemption" if sequence.preemptions else "prompt scored"] += 1
        assert finish == (reason if len(so_far) == len(answer) else None)
        if finish is not None:
            assert sequence.ended
            self.seen["answer done after preemption" if sequence.preemptions else "answer done"] += 1
            state = grammar_of(sequence)
            if state is not None and state.forced_tokens:
                self.seen["forced tokens after preemption" if sequence.preemptions else "forced tokens"] += 1
            self.live.remove(sequence)
            self.texts.append(list(sequence.known))

    @precondition(lambda self: self.flight is not None)
    @rule(pick=st.integers(0, 4))
    def lose_step(self, pick: int) -> None:
        if pick or self.flight is None:
            return
        step, result = self.flight.step, self.flight.result
        if result is None:
            self.runner.write(step)
        was_live = {chunk.sequence for chunk in step.chunks if not chunk.sequence.ended}
        self.flight = None
        failed = self.scheduler.abort_step(step)
        assert set(failed) == was_live
        self.seen["step failed"] += 1
        self.live = [sequence for sequence in self.live if sequence not in was_live]

    @rule()
    def hand_over_pages(self) -> None:
        """A job whose blocks are all readable is done."""
        for job in [sequence for sequence in self.live if sequence.sampling is None]:
            if job.pages and self.pool.hits(job.block_hashes) == len(job.block_hashes):
                assert [self.pool.find(name) for name in job.block_hashes] == job.pages
                self.seen["job done"] += 1
                self.scheduler.end(job)
                self.live.remove(job)

    @precondition(lambda self: self.live)
    @rule(pick=picks, really=st.integers(0, 2))
    def abort(self, pick: int, really: int) -> None:
        if not really:
            sequence = self.live.pop(pick % len(self.live))
            if self.flight is not None and any(chunk.sequence is sequence for chunk in self.flight.step.chunks):
                self.seen["aborted in flight"] += 1
            self.scheduler.end(sequence)
            self.scheduler.end(sequence)

    # Others write and read pages

    @precondition(lambda self: self.pulls)
    @rule(pick=picks)
    def page_arrives(self, pick: int) -> None:
        pull = self.pulls[pick % len(self.pulls)]
        if not pull.remaining or (pull.parts and pick % 2):
            self.part_arrives(pull, pick)
            return
        page = sorted(pull.remaining)[pick % len(pull.remaining)]
        name = pull.remaining.pop(page)
        if not pull.remaining and not pull.parts:
            self.pulls.remove(pull)
        assert self.pool.writer(page) == pull.session
        self.memory.put(page, self.content[name])
        if self.pool.is_arriving(page):
            self.pool.fill(page)
        else:
            self.seen["unwanted page arrived"] += 1
            self.pool.clear_writer(page)

    def part_arrives(self, pull: Pull, pick: int) -> None:
        slot = sorted(pull.parts)[pick % len(pull.parts)]
        name = pull.parts.pop(slot)
        if not pull.remaining and not pull.parts:
            self.pulls.remove(pull)
        assert self.windows.writer(slot) == pull.session
        self.parts.put(slot, self.content[name])
        if self.windows.is_arriving(slot):
            self.windows.fill(slot)
        else:
            self.windows.clear_writer(slot)

    @precondition(lambda self: self.pulls)
    @rule(pick=picks)
    def pull_fails(self, pick: int) -> None:
        pull = self.pulls.pop(pick % len(self.pulls))
        for page in pull.remaining:
            assert self.pool.writer(page) == pull.session
            self.memory.put(page, [GARBAGE] * self.block_size)
            if self.pool.is_wanted(page):
                self.seen["wanted pull failed"] += 1
            self.pool.clear_writer(page)
        for slot in pull.parts:
            assert self.windows.writer(slot) == pull.session
            self.parts.put(slot, [GARBAGE] * self.block_size)
            self.windows.clear_writer(slot)

    @precondition(lambda self: self.content)
    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        known = self.texts[pick % len(self.texts)]
        hashes = prefilling(self.number(), known, self.block_size).block_hashes
        pages = list(self.pool.share_filled(dict(enumerate(hashes))).values())
        if pages:
            self.pins.append(pages)

    @precondition(lambda self: self.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.pool.release(self.pins.pop(pick % len(self.pins)))

    # What always holds

    @invariant()
    def pages_hold_what_their_names_say(self) -> None:
        self.pool.check_integrity()
        for name in self.memory.readable:
            page = self.pool.find(name)
            assert page is not None
            if name in self.content:
                assert self.memory.block(page) == self.content[name]
        for name in self.parts.readable:
            slot = self.windows.find(name)
            assert slot is not None
            if name in self.content:
                assert self.parts.block(slot) == self.content[name]

    @invariant()
    def what_is_kept_is_what_a_look_at_everything_says(self) -> None:
        check_kept(self.scheduler, self.pool, self.block_size)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert self.scheduler.waiting + self.scheduler.running == len(self.live)
        if self.pool.others:
            return  # of blocks with pages, those are computed again that lack a window part before them
        holders = [*self.live, *(chunk.sequence for chunk in self.flight.step.chunks)] if self.flight else self.live
        unwritten = {page for holder in holders for page in holder.pages if self.is_unwritten(page)}
        written = sum(
            sequence.pages[position // self.block_size] not in unwritten
            and not self.comes_from_elsewhere(sequence, position // self.block_size)
            for sequence in self.live
            if sequence.pages
            for position in range(sequence.computed, min(len(sequence.known), len(sequence.pages) * self.block_size))
        )
        unpaged = sum(
            max(0, len(sequence.known) - max(sequence.computed, len(sequence.pages) * self.block_size))
            for sequence in self.live
            if sequence.pages
        )
        waiting = sum(sequence.pending_tokens for sequence in self.live if not sequence.pages)
        assert self.scheduler.load.queued_tokens == waiting + written + unpaged + len(unwritten) * self.block_size

    def is_unwritten(self, page: PageId) -> bool:
        return self.pool.is_arriving(page) and self.pool.writer(page) is None

    def comes_from_elsewhere(self, sequence: Sequence, block: int) -> bool:
        page = sequence.pages[block]
        return self.pool.is_filled(page) or self.pool.writer(page) not in (None, sequence.session)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.come_to_rest()
        self.pool.check_integrity()
        assert not self.live
        assert self.pool.available == self.pool.total
        assert all(self.pool.writer(PageId(page)) is None for page in range(self.pool.total))
        assert self.scheduler.plan() is None
        if self.pool.others:
            assert self.windows.unheld == self.windows.shape.slots
            assert self.windows.has_room(self.windows.shape.slots), "slots are spoken for that nobody can hold"
        if isinstance(self.runner, ExactRunner):
            assert self.runner.unfinished <= released_pages(self.branches), "what is kept of a block never goes"

    def come_to_rest(self) -> None:
        """No more work comes in; what is here must end, whether pulls arrive or fail."""
        for turn in range(MAX_TURNS):
            self.hand_over_pages()
            self.pages_hold_what_their_names_say()
            if self.flight is not None:
                self.end_step()
                continue
            if not (self.live or self.pulls or self.pins):
                return
            self.admit([turn % 3 == 0, False])
            self.begin_step(bool(turn % 2))
            if self.flight is None:
                waited_for = len(self.live)
                self.hand_over_pages()
                assert len(self.live) < waited_for or self.nudge(turn) or not self.live, "wedged"
        raise AssertionError(f"no rest after {MAX_TURNS} turns")

    def nudge(self, turn: int) -> bool:
        """Lets the outside world do one thing; False where it has nothing to do."""
        if self.pulls:
            (self.page_arrives if turn % 3 else self.pull_fails)(turn)
        elif self.pins:
            self.unpin(turn)
        else:
            return False
        return True


def speculation_of(sequence: Sequence, wrong: int) -> Speculation | None:
    """Returns who proposes: nobody for 1, the grammar alone for 0, else also a drafter wrong at one place in
    `wrong`."""
    assert sequence.sampling is not None
    if wrong == 1:
        return None
    drafters: list[Drafter] = [GuessingDrafter(sequence.sampling.seed, wrong)] if wrong else []
    state = grammar_of(sequence)
    if state is not None and sequence.sampling.logprobs is not None:
        drafters.append(ForcedTokens(state.forced_run))
    return Speculation(drafters, Acceptance())
