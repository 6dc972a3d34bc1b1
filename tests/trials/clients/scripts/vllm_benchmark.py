"""`vllm bench serve` without the imports of vLLM's other commands, which want all of its dependencies."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
