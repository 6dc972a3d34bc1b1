"""A request from its token ids to its last token.

The dispatcher hashes its blocks and begins every choice. A choice is placed on a decode worker, reads its tokens, and
survives that worker: it is placed again with the tokens so far. A worker that drains gives its choices to others
(migration). A client that resumes its stream at another router finds it at its decode worker (recovery).
"""
