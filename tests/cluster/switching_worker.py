"""`python -m tests.cluster.switching_worker`: a decode worker that speculates otherwise at every step of an answer.

At each step chance decides who proposes: nobody, one of the drafters, or all of them; and how many tokens are run,
whatever they cost. Chance depends on the length of the answer alone. The draft model draws as on a `sure_worker`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from decode_worker import speculations
from decode_worker.worker import DecodeWorker
from tests.sure_drafts import SureSpeculation
from twostroke.speculation.draft import Draft
from twostroke.worker.process import main


class SwitchingSpeculation(SureSpeculation):
    def propose(self, known: Sequence[int], most: int) -> Draft:
        draws = random.Random(len(known))
        each_alone = [[drafter] for drafter in self._drafters]
        draft, self._proposal, self._certain = self._best(draws.choice([[], self._drafters, *each_alone]), known, most)
        length = draws.randint(0, len(draft.tokens))
        return Draft(draft.tokens[:length], (1.0,) * length)


if __name__ == "__main__":
    speculations.Speculation = SwitchingSpeculation  # type: ignore[misc]  # imported there
    sys.exit(main(DecodeWorker))
