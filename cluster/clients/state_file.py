"""One small file per running `twostroke serve`, by which status, chat and down find it. It holds no secrets."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from router.addresses import Addresses
from twostroke.base.errors import ConfigError, NotFound
from twostroke.base.json_values import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeState:
    pid: int
    started_ticks: int
    """Start of the process, in ticks since boot. By now another process may have the same pid."""
    routers: tuple[Addresses, ...]
    """Addresses of its routers; empty where they run elsewhere."""
    model: str
    log_dir: str
    has_tls: bool = False
    """Whether the routers' client endpoints take TLS."""

    @property
    def endpoints(self) -> str:
        return f"http {self.http}" if self.routers else "routers elsewhere"

    @property
    def http(self) -> str:
        """HTTP address of all routers."""
        return self._first.http

    @property
    def grpc(self) -> str:
        return self._first.grpc

    @property
    def _first(self) -> Addresses:
        if not self.routers:
            raise NotFound(f"the server with pid {self.pid} has no router of its own: name one that runs elsewhere")
        return self.routers[0]


def folder() -> Path:
    """Returns the user's runtime folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "twostroke"
    return Path(tempfile.gettempdir()) / f"twostroke-{os.getuid()}"


def path_of(pid: int) -> Path:
    return folder() / f"{pid}.json"


def write(state: ServeState) -> None:
    """Writes the file. Raises ConfigError where another user owns the folder: a link there could redirect the write."""
    folder().mkdir(mode=0o700, exist_ok=True)
    found = folder().lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder()} must be a folder that only this user can write to; remove it, or set XDG_RUNTIME_DIR",
            field="XDG_RUNTIME_DIR",
        )
    path = path_of(state.pid)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(to_json(state))
    unfinished.replace(path)


def started_ticks(pid: int) -> int | None:
    """Returns when a process started; None if there is none."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything; what follows the last ")" is field 3.
    fields = found.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def read(path: Path) -> ServeState:
    """Reads a file. Raises OSError, or ConfigError where it holds something else."""
    return from_json(ServeState, path.read_text())


def running() -> list[ServeState]:
    """Returns this user's servers on this machine. Files of killed launchers are skipped."""
    states = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ConfigError):
            # In a folder that all may write to, another user's file could send our chats to that user.
            if path.stat().st_uid != os.getuid():
                continue
            state = read(path)
            if started_ticks(state.pid) == state.started_ticks:
                states.append(state)
    return states


def the_one_running(pid: int | None = None) -> ServeState:
    """Returns the only running server, or the one with this pid. Raises NotFound or ConfigError."""
    states = [state for state in running() if pid in (None, state.pid)]
    if not states:
        meant = "twostroke serve is" if pid is None else f"twostroke serve with pid {pid} is"
        raise NotFound(f"no {meant} running on this machine for this user (looked in {folder()})")
    if len(states) > 1:
        listed = ", ".join(f"{state.pid} ({state.endpoints})" for state in states)
        raise ConfigError(f"several servers are running; say which with --pid: {listed}", field="--pid")
    return states[0]


def the_one_for_clients(pid: int | None, *, speaks_tls: bool) -> ServeState:
    """Returns the server that a client means when no address is given. Raises NotFound or ConfigError."""
    state = the_one_running(pid)
    if state.has_tls and not speaks_tls:
        raise ConfigError(
            "this user's server speaks TLS: say --tls-ca FILE, the CA that its certificate comes from", field="--tls-ca"
        )
    return state


def own(routers: tuple[Addresses, ...], model: str, log_dir: str, *, has_tls: bool = False) -> ServeState:
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    return ServeState(
        pid=os.getpid(), started_ticks=ticks, routers=routers, model=model, log_dir=log_dir, has_tls=has_tls
    )
