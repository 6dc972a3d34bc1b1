"""The commands of `twostroke`: each module has `add_arguments(parser)` and `run(args) -> exit status`.

serving   starts and ends servers and routers, and provides the models and the keys that they need
looking   shows what a running server does
changing  changes a running server: its workers, their weights, and what they hold
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "serve": Command("cluster.commands.serving.serve", "start workers and router, serve until Ctrl-C"),
    "up": Command("cluster.commands.serving.up", "serve from a cluster file; continue with a fleet that runs already"),
    "router": Command("cluster.commands.serving.router", "serve as one more router of a fleet that runs elsewhere"),
    "status": Command("cluster.commands.looking.status", "show a running server's workers, load and pages"),
    "console": Command("cluster.commands.looking.console", "print the address of the console, a page for operators"),
    "trace": Command("cluster.commands.looking.trace", "show where the time of one request went, by its id"),
    "profile": Command(
        "cluster.commands.looking.profile", "record where routers and workers spend their time, as a trace"
    ),
    "pin": Command(
        "cluster.commands.changing.pin", "keep prefixes of prompts, as system prompts, in the workers' caches"
    ),
    "adapter": Command(
        "cluster.commands.changing.adapter", "load and unload LoRA adapters, which clients call as models"
    ),
    "keys": Command("cluster.commands.serving.keys", "add, list and revoke the API keys of clients"),
    "model": Command("cluster.commands.serving.model", "fetch models ahead of time, and list those that are here"),
    "drain": Command("cluster.commands.changing.drain", "let a worker hand over what it has and leave"),
    "scale": Command("cluster.commands.changing.scale", "say how many workers of each role there should be"),
    "sleep": Command("cluster.commands.changing.sleep", "let a worker free its memory and keep its process"),
    "wake": Command("cluster.commands.changing.wake", "let a worker that is asleep serve again"),
    "reload": Command("cluster.commands.changing.reload", "change the weights of all workers while they are used"),
    "role": Command(
        "cluster.commands.changing.role", "let a worker become the other role without loading its model again"
    ),
    "restart": Command(
        "cluster.commands.changing.restart",
        "restart workers, routers and the supervisor, one by one, while they are used",
    ),
    "down": Command("cluster.commands.serving.down", "stop a running server"),
}
