"""The commands of `twostroke`: each module has `add_arguments(parser)` and `run(args) -> exit status`.

serving   starts and ends servers and routers, and provides the models and the keys that they need
looking   shows what a running server does
changing  changes a running server: its workers, their weights, and what they hold
"""
