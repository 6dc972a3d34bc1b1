"""`twostroke console`: prints the address of the console with the operator's key in it, to open in a browser."""

from __future__ import annotations

import argparse

from cluster.clients import admin_access
from cluster.clients.admin_access import router_info
from router.addresses import reachable
from router.auth.api_keys import operator_key
from twostroke.base.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_access.add_arguments(parser)
    parser.add_argument("--key", action="store_true", help="print the operator's key alone")
    parser.add_argument("--tls", action="store_true", help="the router's port for clients takes TLS")


def run(args: argparse.Namespace) -> int:
    access = admin_access.access_from(args)
    if not access.token:
        raise ConfigError("the cluster's token is not known, and the operator's key is made of it")
    key = operator_key(access.token)
    if args.key:
        print(key)
        return 0
    for address in access.addresses:
        # Behind the #, so that no browser sends it to a server.
        scheme = "https" if args.tls else "http"
        print(f"{scheme}://{reachable(router_info(address, access).http_address)}/console#key={key}")
    return 0
