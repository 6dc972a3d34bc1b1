"""Life of a pull on a prefill worker: a page factory that never samples.

WAITING   in the bounded queue, holding nothing
BUILDING  pages for all its missing blocks are claimed; what a peer holds is fetched there, chunks of the rest run,
          equal blocks once for all pulls
HELD      every wanted block is announced; pages stay held as long as the call is open
CLOSED    the call has ended, from either side; pages are cached, and blocks that no other pull wants are not computed

jobs  pulls as sequences    branches  the table of branches
"""
