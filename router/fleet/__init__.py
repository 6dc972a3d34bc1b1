"""This package keeps what a router knows of the workers.

The supervisor lists them (`fleet`). Each of them is followed by its event stream (`feed`), and judged alive, suspect or
dead (`liveness`). A decode worker gets one connection (`worker_link`, kept in `link_pool`), over
which all requests are opened and all tokens come, those of each attempt in a `token_stream`. `worker` also has what all
decode workers have in common. `demand` tells the supervisor what clients ask for.
"""
