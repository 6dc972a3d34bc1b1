"""Life of a request on a decode worker, its owner.

WAITING   in the bounded queue, holding nothing
RESERVED  pages for the prompt plus one are claimed; nothing has arrived
PULLING   pages stream in from the page source; costs no compute
RUNNING   computed catches up with known, one token per step from there on
DONE      pages are back in the pool; the tokens are kept until the router has them
FAILED    pages are back in the pool and the router has been told why

service          the Decode rpc             request_manager  all open requests
request_state    one request, its stages    scored_prompts   logprobs of prompts
grammars         compiled aside             speculations     who proposes the next tokens
branches         the table of branches      local_prefill    which pulls are computed here instead
output_stream    one token stream per router
"""
