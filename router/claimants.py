"""Whether requests of more than one claimant come here: as long as they are one's, their order hardly matters. Pure."""

from __future__ import annotations

from router.wanting import Wanting

REMEMBERED_S = 60.0
"""A claimant that asks now and then is one all the time: others' work must not pile up between its requests."""

_Claimant = tuple[int, str]
"""Class and tenant."""


class Claimants:
    def __init__(self) -> None:
        self._asked_at_s: dict[_Claimant, float] = {}
        """The longest ago first."""

    @property
    def are_several(self) -> bool:
        return len(self._asked_at_s) > 1

    def ask(self, wanting: Wanting, now_s: float) -> None:
        claimant = (wanting.priority, wanting.tenant)
        self._asked_at_s.pop(claimant, None)
        self._asked_at_s[claimant] = now_s
        while next(iter(self._asked_at_s.values())) + REMEMBERED_S < now_s:
            del self._asked_at_s[next(iter(self._asked_at_s))]
