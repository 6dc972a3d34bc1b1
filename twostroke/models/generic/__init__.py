"""Serves any other causal language model: the code of transformers runs it, with our attention over pages.

refusals.py    refuses by the config alone what cannot be served so
interface.py   intercepts the queries, keys and values of a layer in transformers' code
probe.py       makes a model's spec from one step without weights, which shows the attention that each layer asks for
checkpoint.py  the weights, loaded by transformers, and what is wrong with them
paged_model.py the model whose steps run over pages
"""
