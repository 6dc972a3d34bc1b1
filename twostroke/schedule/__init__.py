"""Which tokens run next: computed catches up with known. Pure Python, no torch.

sequence   a request's tokens, pages and how far its KV is computed
scheduler  the one rule: prefix hits, arriving pages and forward passes all advance `computed`
line       the sequences that wait, and what they will have computed here
cost       what a step is predicted to take, and how much of prompts fits beside running streams
takeover   which prompts a decode worker computes instead of waiting for their pages
batching   from chosen token ranges to a batch
batch      what one step is told and what it answers: frozen host data
"""
