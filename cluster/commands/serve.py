"""`twostroke serve`: flags to ClusterConfig. Every default is the one in `twostroke.config`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from cluster.flags import scaling, security, tracing
from cluster.launcher import serve
from router.policies import POLICIES
from twostroke.config import (
    CPU_STEP_TOKENS,
    DEVICE_SHARE,
    GPU_STEP_TOKENS,
    HOST_CACHE_BYTES,
    CacheConfig,
    ClusterConfig,
    ModelConfig,
    PatienceConfig,
    ScheduleConfig,
)

DEFAULTS = ClusterConfig()

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def memory_bytes(text: str) -> int:
    """ "2G", "2GiB" and "2048M" are powers of 1024, "2GB" is of 1000, a bare number is bytes."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if matched is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write bytes, or for example 512M, 2G, 2GiB, 2GB")
    number, unit, suffix = matched[1], matched[2].lower(), (matched[3] or "").lower()
    base = 1000 if unit and suffix == "b" else 1024
    return int(float(number) * base ** _UNITS[unit])


def size_text(size_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_fleet(parser.add_argument_group("fleet"))
    _add_routing(parser.add_argument_group("routing"))
    _add_model(parser.add_argument_group("model"))
    _add_schedule(parser.add_argument_group("memory and scheduling"))
    scaling.add(parser)
    security.add(parser)
    tracing.add(parser)


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill",
        type=int,
        default=DEFAULTS.prefill,
        metavar="N",
        help=_help("prefill workers; 0: decode workers do both"),
    )
    group.add_argument("--decode", type=int, default=DEFAULTS.decode, metavar="N", help=_help("decode workers"))
    group.add_argument(
        "--routers",
        type=int,
        default=DEFAULTS.routers,
        metavar="N",
        help=_help("routers, on ports counted up from --http-port and --grpc-port"),
    )
    group.add_argument("--host", default=DEFAULTS.host, help=_help("interface that clients connect to"))
    group.add_argument(
        "--http-port",
        type=int,
        default=DEFAULTS.http_port,
        metavar="PORT",
        help=_help("OpenAI HTTP API; 0: any free one"),
    )
    group.add_argument(
        "--grpc-port",
        type=int,
        default=DEFAULTS.grpc_port,
        metavar="PORT",
        help=_help("twostroke.v1 gRPC API; 0: any free one"),
    )
    group.add_argument(
        "--threads", type=int, default=DEFAULTS.threads, metavar="N", help=_help("compute threads of each worker")
    )
    group.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.pin,
        help=_help("keep each compute thread on its core"),
    )
    group.add_argument(
        "--borrow",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.borrow,
        help=_help("compute on cores of other workers too while those are idle"),
    )
    group.add_argument(
        "--transports",
        default=None,
        metavar="NAMES",
        help="how pages travel, best first, of cuda_ipc, shm, nixl, tcp (default: shm,tcp, or cuda_ipc,tcp on GPUs)",
    )
    group.add_argument(
        "--address",
        default=DEFAULTS.address,
        metavar="HOST:PORT",
        help="join this Ray cluster, with the token of RAY_AUTH_TOKEN (default: a local Ray that ends with it)",
    )


def _add_routing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy", choices=sorted(POLICIES), default=DEFAULTS.policy, help=_help("how requests find their workers")
    )
    group.add_argument(
        "--seed",
        type=int,
        default=DEFAULTS.seed,
        help="of everything the router draws (default: from the operating system)",
    )
    group.add_argument(
        "--request-log",
        default=DEFAULTS.request_log,
        metavar="FILE",
        help="append a line of JSON for every answer: times, placement, predictions, block names, no text "
        "(default: none)",
    )
    group.add_argument(
        "--slo-ttft",
        type=float,
        default=DEFAULTS.slo_ttft_s,
        metavar="SECONDS",
        help="refuse requests (429 with Retry-After) whose first token is predicted later than this (default: none)",
    )
    group.add_argument(
        "--orphan-grace",
        type=float,
        default=DEFAULTS.orphan_grace_s,
        metavar="SECONDS",
        help=_help("how long decode workers keep answers whose router is gone"),
    )
    group.add_argument(
        "--suspect-after",
        type=float,
        default=DEFAULTS.patience.suspect_after_s,
        metavar="SECONDS",
        help=_help("a worker that is silent for so long gets no new work"),
    )
    group.add_argument(
        "--dead-after",
        type=float,
        default=DEFAULTS.patience.dead_after_s,
        metavar="SECONDS",
        help=_help("what a worker has that is silent for so long goes on elsewhere"),
    )
    group.add_argument(
        "--max-held",
        type=int,
        default=DEFAULTS.max_held,
        metavar="N",
        help=_help("requests that may wait in a router for their turn"),
    )
    group.add_argument(
        "--public-prefix",
        action="append",
        default=[],
        metavar="FILE",
        help='a beginning of prompts that tenants may share: text, or FILE.json with {"messages": [...]}; may be given '
        "several times (default: tenants share nothing)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    model = DEFAULTS.model
    group.add_argument(
        "--model", default=model.model, help=_help("a name of the catalogue, a directory, a hub id, or paced:SPEC")
    )
    group.add_argument(
        "--served-model-name",
        default=model.served_model_name,
        metavar="NAME",
        help="what clients call it (default: as --model)",
    )
    group.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default=model.dtype, help=_help("of weights and KV")
    )
    group.add_argument(
        "--weights",
        choices=("model", "int8"),
        default=model.weights,
        help=_help("as the model has them, or rounded to int8: faster on CPUs, less exact"),
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        default=model.max_model_len,
        metavar="TOKENS",
        help="prompt and answer together (default: what the model was made for)",
    )
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=model.deterministic,
        help=_help("a stream's bits depend on no other, whatever dies; refused where that cannot be kept"),
    )
    group.add_argument(
        "--device", default=model.device, metavar="DEVICE", help=_help("what computes: cpu, cuda, cuda:N, or auto")
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    cache, schedule = DEFAULTS.cache, DEFAULTS.schedule
    group.add_argument(
        "--block-size", type=int, default=cache.block_size, metavar="TOKENS", help=_help("tokens per KV block")
    )
    group.add_argument(
        "--kv-cache-memory",
        type=memory_bytes,
        default=cache.kv_cache_memory_bytes,
        metavar="SIZE",
        help=f"page memory of each worker: bytes, 512M, 2G, 2GiB (default: {size_text(HOST_CACHE_BYTES)} on a CPU; "
        f"on a GPU {DEVICE_SHARE:.0%}% of its memory, weights included, over all workers)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=schedule.max_num_seqs,
        metavar="N",
        help=_help("sequences that hold pages at once on one worker"),
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=schedule.max_num_batched_tokens,
        metavar="N",
        help=f"tokens in one step (default: {CPU_STEP_TOKENS} on CPUs, {GPU_STEP_TOKENS} on GPUs; twice --max-num-seqs "
        "where that is more)",
    )
    group.add_argument(
        "--step-target-ms",
        type=float,
        default=schedule.step_target_s * 1e3,
        metavar="MS",
        help=_help("length of a step in which streams run: how much of prompts runs beside them"),
    )
    group.add_argument(
        "--takeover",
        action=argparse.BooleanOptionalAction,
        default=schedule.takeover,
        help=_help("decode workers with room compute prompts that would wait at a prefill worker"),
    )


def _help(text: str) -> str:
    return f"{text} (default: %(default)s)"


def config_from(args: argparse.Namespace) -> ClusterConfig:
    """Raises ConfigError that names the flag."""
    return ClusterConfig(
        prefill=args.prefill,
        decode=args.decode,
        routers=args.routers,
        address=args.address,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        threads=args.threads,
        pin=args.pin,
        borrow=args.borrow,
        transports=None if args.transports is None else tuple(args.transports.split(",")),
        policy=args.policy,
        seed=args.seed,
        slo_ttft_s=args.slo_ttft,
        max_held=args.max_held,
        orphan_grace_s=args.orphan_grace,
        request_log=None if args.request_log is None else str(Path(args.request_log).absolute()),
        public_prefixes=tuple(str(Path(file).absolute()) for file in args.public_prefix),
        doors=security.doors_from(args),
        tracing=tracing.config_from(args),
        patience=PatienceConfig(suspect_after_s=args.suspect_after, dead_after_s=args.dead_after),
        model=ModelConfig(
            model=args.model,
            dtype=args.dtype,
            weights=args.weights,
            max_model_len=args.max_model_len,
            served_model_name=args.served_model_name,
            deterministic=args.deterministic,
            device=args.device,
        ),
        cache=CacheConfig(block_size=args.block_size, kv_cache_memory_bytes=args.kv_cache_memory),
        schedule=ScheduleConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            step_target_s=args.step_target_ms / 1e3,
            takeover=args.takeover,
        ),
        scaling=scaling.config_from(args),
    )


def run(args: argparse.Namespace) -> int:
    return serve(config_from(args))
