"""The scheduler decides which tokens run next: computed catches up with known. Pure Python, no torch.

sequence       a request's tokens, pages and how far its KV is computed
scheduler      the one rule: prefix hits, arriving pages and forward passes all advance `computed`
progress       how a sequence comes on through its blocks; window_progress: where windows have parts of their own
waiting_queue  the sequences that wait for pages, and their pending tokens
cost           predicted length of a step, and how much of prompts fits beside running streams
local_prefill  which prompts a decode worker computes instead of waiting for their pages
emission       sampled tokens become known, and those that grammars force after them
batching       from chosen token ranges to a batch
batch          input and result of one step: frozen host data
"""
