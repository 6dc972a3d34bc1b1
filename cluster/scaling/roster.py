"""Who shall be there, and as what. Written down as one value before anybody is told, so no half of a change is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from twostroke.config import Role, WorkerConfig


@dataclass(frozen=True, slots=True)
class Post:
    """Of one worker."""

    role: Role
    is_retiring: bool = False
    """It drains and leaves for good; its post goes when it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    fleet: str
    """Whose: one that an earlier fleet has left behind is nobody's."""
    posts: dict[str, Post]
    """By worker id. A worker keeps its id when it becomes the other role."""
    is_automatic: bool
    """The planner decides; else counts stay as they were said."""
    reason: str = ""
    """Of the last change, for people."""

    @classmethod
    def of(cls, fleet: str, workers: Iterable[WorkerConfig], *, is_automatic: bool) -> Roster:
        return cls(fleet=fleet, posts={each.worker_id: Post(each.role) for each in workers}, is_automatic=is_automatic)

    def staff(self, role: Role, gone: Collection[str] = ()) -> list[str]:
        """Workers that shall stay in this role, without those in `gone`."""
        return [name for name in self._staying(gone) if self.posts[name].role is role]

    def placed(self, role: Role, gone: Collection[str] = ()) -> int:
        """Workers that shall stay and have room as this role asks for it: a switch moves nobody to another node."""
        return sum(placed_as(name) is role for name in self._staying(gone))

    def _staying(self, gone: Collection[str]) -> list[str]:
        return [name for name, post in self.posts.items() if not post.is_retiring and name not in gone]

    def with_post(self, worker_id: str, post: Post) -> Roster:
        return replace(self, posts={**self.posts, worker_id: post})

    def without(self, worker_id: str) -> Roster:
        return replace(self, posts={name: post for name, post in self.posts.items() if name != worker_id})

    def new_name(self, role: Role) -> str:
        """The first that nobody has."""
        return next(name for number in range(len(self.posts) + 1) if (name := f"{role}-{number}") not in self.posts)


def placed_as(worker_id: str) -> Role:
    """Names begin with the role in which a worker was asked for."""
    return Role(worker_id.rpartition("-")[0])
