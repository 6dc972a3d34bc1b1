"""Stock clients, each unmodified in an environment of its own below the project's: `make clients` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.trials.clients.asks import PATIENCE_S, Json, Served, wrong

ENVIRONMENTS = Path(sys.prefix) / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
CHATS, ALL = ("chat",), ("chat", "response", "completion")


class ClientOfAKind(Protocol):
    """A library or a benchmark."""

    @property
    def name(self) -> str: ...

    @property
    def asked(self) -> str:
        """What it asks for, in words."""

    def version(self) -> str: ...

    def problems(self, served: Served, expected: dict[str, Json]) -> list[str]:
        """What it saw otherwise than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockClient:
    name: str
    """The client's name, which is its environment's, too."""
    package: str
    script: str
    kinds: tuple[str, ...] = ALL
    """What it can ask."""
    too_long: str = "context_length_exceeded"
    """What it calls a request that is too long."""

    @property
    def asked(self) -> str:
        kinds = [f"{kind}s" for kind in self.kinds]
        asked = " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
        return f"{asked}, whole and streamed, with usage; one too long"

    @property
    def home(self) -> Path:
        return ENVIRONMENTS / self.name

    def version(self) -> str:
        return installed_version(self.home, self.package)

    @property
    def is_installed(self) -> bool:
        return (self.home / ".installed").exists()

    def command(self) -> list[str]:
        script = str(SCRIPTS / self.script)
        return ["node", script] if script.endswith(".mjs") else [str(self.home / "bin/python"), script]

    def problems(self, served: Served, expected: dict[str, Json]) -> list[str]:
        done = subprocess.run(
            self.command(),
            input=json.dumps(served.given()),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=self.home,
            env=environment(),
        )
        if done.returncode != 0:
            return [f"ended with {done.returncode}: {done.stderr[-2000:]}"]
        return wrong(json.loads(done.stdout.splitlines()[-1]), expected, self.too_long, self.kinds)


def installed_version(home: Path, package: str) -> str:
    manifest = home / "node_modules" / package / "package.json"
    if manifest.exists():
        return str(json.loads(manifest.read_text())["version"])
    (folder,) = home.glob(f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info")
    return folder.name.removesuffix(".dist-info").rpartition("-")[2]


def environment() -> dict[str, str]:
    """Nothing of the project's, and nobody is called but the server."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }


OPENAI = StockClient(name="openai", package="openai", script="openai_package.py")
LITELLM = StockClient(
    name="litellm",
    package="litellm",
    script="litellm_package.py",
    kinds=("chat", "completion"),
    too_long="ContextWindowExceededError",
)
LANGCHAIN = StockClient(
    name="langchain",
    package="langchain-openai",
    script="langchain_package.py",
    kinds=("chat", "response"),
    too_long="OpenAIContextOverflowError",
)
PYDANTIC_AI = StockClient(
    name="pydantic-ai", package="pydantic-ai-slim", script="pydantic_ai_package.py", kinds=("chat", "response")
)
ANTHROPIC = StockClient(
    name="anthropic",
    package="anthropic",
    script="anthropic_package.py",
    kinds=CHATS,
    too_long="prompt is too long",
)
TRITONCLIENT = StockClient(
    name="tritonclient",
    package="tritonclient",
    script="tritonclient_package.py",
    kinds=("completion",),
    too_long="This model's maximum context length",
)
NODE = StockClient(name="node", package="openai", script="openai_package.mjs")
