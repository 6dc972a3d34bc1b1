"""The families of models that are served: one file each, and one line each in `table`.

published.py   a model's config as its makers published it, and how an option that is not computed is refused
common.py      what families of Llama's kind have in common
ropes.py       rotary positions from a config's parameters
tensors.py     a family's tensors under the names that the rest of the program knows
table.py       the families by architecture
"""
