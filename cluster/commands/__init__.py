"""The commands of `twostroke`: each module has `add_arguments(parser)` and `run(args) -> exit status`."""
