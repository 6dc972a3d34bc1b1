"""What a router knows of the workers, and its connections to them.

The supervisor lists them (`fleet`). The router reads the event stream of each (`feed`), and judges it alive, suspect or
dead (`liveness`). A decode worker gets one connection (`worker_link`, kept in `link_pool`) for all of its requests and
their tokens. The tokens of one attempt are a `token_stream`. `worker` also holds the facts that all decode workers have
in common. `demand` reports to the supervisor what clients request.
"""
