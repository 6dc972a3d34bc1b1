"""Pages that are pulled from other workers: blocks are asked for, verified and committed.

pull_client  pulls blocks, verifies and commits them
pull_call    the puller's end of one call
announced    the columns of pages that a source announces together
"""
