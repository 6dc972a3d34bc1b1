"""Serves any other causal language model: the code of transformers runs it, with our attention over pages.

refusals.py    what cannot be served so, told from the config alone
interface.py   where transformers' code hands over the queries, keys and values of a layer
probe.py       one step without weights, which shows what each layer asks of attention: the model's spec
checkpoint.py  the weights, loaded by transformers, and what is wrong with them
paged_model.py the model whose steps run over pages
"""
