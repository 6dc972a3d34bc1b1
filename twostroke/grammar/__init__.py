"""Grammars: which tokens may come next in an answer that has to match one.

`vocabulary` knows what bytes each token of a model stands for. `compiler` compiles a grammar for a vocabulary, within
limits. `twostroke.base.token_mask` is the set of tokens that may come next. `state` follows one answer as a function of
the grammar and of the answer's tokens so far. `advance` takes in sampled tokens on threads, so that a slow grammar
delays no other answer. Nothing here loads torch: routers use it to check grammars before decode workers apply them.
"""
