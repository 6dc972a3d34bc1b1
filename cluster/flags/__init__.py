"""Flags by subject: each module has `add(parser)`, and what reads them into a part of the config.

Every flag is a key of the cluster file, too: `cluster.file.sections` says which.
"""
