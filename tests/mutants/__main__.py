"""`python -m tests.mutants`: makes mistakes in copies of the tree, and runs the tests that are to notice them."""

from __future__ import annotations

import argparse
import sys

from tests.mutants.run import chosen, run

JOBS = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "-j", "--jobs", type=int, default=JOBS, help=f"mutants at once, each in a copy (default: {JOBS})"
    )
    parser.add_argument("--list", action="store_true", help="name the mutants and their claims, and run none")
    parser.add_argument("only", nargs="*", metavar="PATTERN", help="of names or files: 'noise-*', 'router/*'")
    options = parser.parse_args()
    mutants = chosen(options.only)
    if not mutants or options.jobs < 1:
        parser.error("no mutant has such a name or file" if options.jobs > 0 else "at least one job is needed")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.claim}")
        return 0
    return run(mutants, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
