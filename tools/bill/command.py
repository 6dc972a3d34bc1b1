"""`twostroke bill`: what a model and its pages take on a machine, before anything is started."""

from __future__ import annotations

import argparse

from tools.bill.bill import as_json, make_bill
from tools.bill.options import BillFlags
from tools.bill.report import print_bill, render_page
from tools.output import write_json, write_text
from tools.tables import console_for
from twostroke.config import flags

EPILOG = """examples:
  twostroke bill --kv-cache-memory 4G --length 2048,8192
  twostroke bill --model DIRECTORY --device-memory 80G --kv-format int8 --bandwidth 3350
  twostroke bill --log requests.log --host-cache 8G --disk-cache 100G --html bill.html
  twostroke bill --measure --disk-cache-dir /var/cache/twostroke
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add(parser, BillFlags)


def run(args: argparse.Namespace) -> int:
    """Raises ServeError for bad flags and files, and for what a worker would refuse."""
    flags_given = flags.read(BillFlags, args)
    bill = make_bill(flags_given)
    print_bill(console_for(flags_given.output.json_path), bill)
    if flags_given.output.json_path is not None:
        write_json(as_json(bill), flags_given.output.json_path)
    if flags_given.output.html_path is not None:
        write_text(render_page(bill), flags_given.output.html_path)
    return 0
