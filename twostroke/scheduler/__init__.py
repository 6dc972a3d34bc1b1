"""The scheduler decides which tokens run next: computed catches up with known. Pure Python, no torch.

sequence       a request's tokens, pages and how far its KV is computed; its demand, and what features change in it
scheduler      the one rule: prefix hits, arriving pages and forward passes all advance `computed`
choosing       the tokens of one step, by the demands of the sequences and the token budget
progress       how a sequence comes on through its blocks; windows: where layers with a window keep parts of their own
running        the sequences that wait and those that run, by what a step is to do, and sums of their work
cost           predicted length of a step, and how much of prompts fits beside running streams
local_prefill  which prompts a decode worker computes instead of waiting for their pages
emission       sampled tokens become known; reading: or what the reader of an answer makes of them
batching       from chosen token ranges to a batch
batch          input and result of one step: frozen host data
branches       what features hand to a scheduler; constraints: these features
"""
