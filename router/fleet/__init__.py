"""The workers, as a router knows them.

The supervisor lists them (`fleet`). Each of them is followed by its event stream (`feed`), and judged alive, suspect or
dead (`liveness`, `failure_detector`). A decode worker gets one connection (`worker_link`), over which all requests are
opened and all tokens come.
"""
