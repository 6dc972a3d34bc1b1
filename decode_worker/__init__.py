"""Life of a request on a decode worker, its owner.

WAITING   in the bounded queue, holding nothing
RESERVED  pages for the prompt plus one are claimed; nothing has arrived
PULLING   pages stream in from the page source; costs no compute
RUNNING   computed catches up with known, one token per step from there on
DONE      pages are back in the pool; the answer is kept until the router has it
FAILED    pages are back in the pool and the router has been told why

worker     the plain class               service   the Decode rpc
answer     one answer's record           book      all open answers: opened, pulled for, ended
stage      the stages and what may follow each
admission  what can never be served      outbox    one token stream per router
takeover   which pulls are computed here instead
"""
