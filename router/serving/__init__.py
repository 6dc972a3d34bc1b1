"""Serves a request from its token ids to its last token.

The dispatcher hashes its blocks and begins every choice. A choice is placed on a decode worker and reads its tokens. If
that worker is lost, the choice is placed again with the tokens so far. Choices of a worker that drains move to others
(migration). When a client resumes its stream at another router, that router finds it at its decode worker (recovery).
"""
