"""Prints what `twostroke serve` tells people: progress, crashes, and the commands to paste."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.flags import client_credentials as credentials
from cluster.terminal.activity import Activity, ActivityLine
from router.addresses import Addresses, reachable

if TYPE_CHECKING:  # commands that only print need no settings
    from twostroke.config import ClusterConfig

QUESTION = "Why is the sky blue?"
SCRIPT = "twostroke"
"""Name of the installed program."""
INSTALLED_IN = ("site-packages", "dist-packages")
"""Folders that every interpreter searches without being told."""


class Announcer:
    """Prints progress to stderr with the seconds since the start, and the banner, which people copy from, to stdout."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._started_s = clock()
        self._said_last = ""
        self._line = ActivityLine(self._console, self.say, clock)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def begin(self, stage: str) -> None:
        """Prints a stage, and shows it as running until the next stage begins or `end` is called."""
        self.say(stage)
        self._line.begin(stage)

    def detail(self, activities: Sequence[Activity]) -> None:
        """Shows who does what in the current stage. Callers repeat the call while the stage lasts."""
        self._line.detail(activities)

    def end(self) -> None:
        """Stops showing progress; the terminal is as it was found."""
        self._line.end()

    def say(self, text: str) -> None:
        self._print(text, style=None)

    def say_once(self, text: str) -> None:
        """Prints a text unless it is what was printed last by this method."""
        if text != self._said_last:
            self.say(text)
            self._said_last = text

    def warn(self, text: str) -> None:
        self._print(text, style="yellow")

    def ready(self, config: ClusterConfig, routers: Sequence[Addresses], folder: Path, model_dir: str) -> None:
        """Prints the banner. `model_dir` holds the tokenizer's files; empty for a model without any."""
        self.end()
        workers = (
            f"{config.prefill} prefill, {config.decode} decode" if config.prefill else f"{config.decode} colocated"
        )
        head = f"\ntwostroke serves {config.model.public_name} ({workers}), ready after {self.elapsed_s:.1f} s"
        end = "Ctrl-C ends it."
        if not routers:
            print(f"{head}\n  routers       elsewhere: twostroke router\n  logs          {folder}\n\n{end}", flush=True)
            return
        scheme = "http" if config.certificates.clients is None else "https"
        print(
            f"{head}\n"
            f"  OpenAI HTTP   {scheme}://{routers[0].http}/v1\n"
            f"  gRPC          {routers[0].grpc}\n"
            f"  admin         {'  '.join(router.admin for router in routers)}\n"
            f"  metrics       {'  '.join(metrics_url(router, scheme) for router in routers)}\n"
            f"  console       {console_line(config)}\n"
            f"{f'  tokenizer     {model_dir}{chr(10)}' if model_dir else ''}"
            f"  logs          {folder}\n\n"
            f"{_needed(config)}"
            f"{curl_line(routers[0].http, config)}\n\n"
            f"{grpc_line(routers[0].grpc, config)}\n"
            "(without the question: a conversation)\n\n"
            f"{end}",
            flush=True,
        )

    def _print(self, text: str, style: str | None) -> None:
        self._console.print(f"[{self.elapsed_s:5.1f} s] {text}", style=style, markup=False)


def metrics_url(router: Addresses, scheme: str) -> str:
    """Returns the URL of a router's metrics. A metrics port of its own takes no TLS."""
    return f"{scheme if router.metrics == router.http else 'http'}://{router.metrics}/metrics"


def console_line(config: ClusterConfig) -> str:
    """Returns the command that prints the console's address, with the key that this one must not show."""
    return shlex.join([*program(), "console", *(["--tls"] if config.certificates.clients is not None else [])])


def curl_line(http: str, config: ClusterConfig) -> str:
    scheme = "http" if config.certificates.clients is None else "https"
    body = {"model": config.model.public_name, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    url = f"{scheme}://{reachable(http)}/v1/chat/completions"
    sent = f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return " ".join(["curl -N", *(option for option, _ in _credentials(config)), url, sent])


def grpc_line(grpc: str, config: ClusterConfig) -> str:
    tls = "--tls " if config.certificates.clients is not None else ""
    return f"{shlex.join(program())} chat {tls}--grpc {reachable(grpc)} {shlex.quote(QUESTION)}"


def _needed(config: ClusterConfig) -> str:
    """Names the variables that both command lines read."""
    variables = [variable for _, variable in _credentials(config)]
    return f"with {', '.join(variables)} in the environment:\n" if variables else ""


def _credentials(config: ClusterConfig) -> list[tuple[str, str]]:
    """Returns pairs of (option of curl, variable that it reads and what that holds), as `twostroke chat` uses them."""
    needed: list[tuple[str, str]] = []
    ca, cert, key = (credentials.tls_variable(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    if config.certificates.clients is not None:
        needed.append((f'--cacert "${ca}"', f"{ca} (file: CAs of this certificate)"))
        if config.certificates.clients.ca is not None:
            needed.append((f'--cert "${cert}" --key "${key}"', f"{cert} and {key} (files: yours)"))
    if config.endpoints.api_keys is not None:
        needed.append(
            (f'-H "Authorization: Bearer ${credentials.API_KEY_VARIABLE}"', f"{credentials.API_KEY_VARIABLE} (a key)")
        )
    return needed


def program() -> list[str]:
    """Returns the words that run this program from any folder, also where no environment is activated."""
    for script in (Path(sys.argv[0]), Path(sys.executable).parent / SCRIPT):
        if script.name == SCRIPT and script.is_file():
            return [str(script.absolute())]
    home = Path(__file__).resolve().parents[2]
    module = [sys.executable, "-m", "tools.cli"]
    return module if home.name in INSTALLED_IN else ["env", f"PYTHONPATH={home}", *module]
