"""The scheduler decides which tokens run next: computed catches up with known. Pure Python, no torch.

sequence       a request's tokens and pages, how far its KV is computed, and what it demands of the next step
scheduler      the one rule: prefix hits, arriving pages and forward passes all advance `computed`
choosing       the tokens of one step, by the demands of the sequences and the token budget
progress       how a sequence advances through its blocks; windows: the same for layers with a window
running        the sequences that wait and those that run, by what a step is to do, and sums of their work
cost           predicted length of a step, and how many prompt tokens fit beside running streams
local_prefill  which prompts a decode worker computes instead of waiting for their pages
emission       makes sampled tokens known; reading: interface of readers, which may change what becomes known
batching       from chosen token ranges to a batch
batch          input and result of one step: frozen host data
branches       what features hand to a scheduler; constraints: these features
"""
