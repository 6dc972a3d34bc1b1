"""Kernels for CUDA devices, written in Triton. Those of attention have a reference in `kernels/reference.py`.

store.py        rope on q and k; k and v into their slots
decode.py       few query rows over long contexts: the context is split among programs, a second kernel merges
prefill.py      tiles of query rows over pages, causal by position
grouped.py      products of experts over rows that are sorted by expert
codes.py        products with weights that stay codes
elementwise.py  norms with their residual sum, the gated activation
bytes.py        numbers of one byte: decoded after a load, encoded before a store
rules.py        windows, soft caps and sinks of layers
attention.py    the backend, which chooses a kernel for each span
page_forms      the same for pages of 4-bit numbers, whose blocks are stored whole

Every launch reads slots, lengths and block tables on the device and never waits for the device. So all launches can be
captured in a CUDA graph. A captured graph keeps the grid (how many tokens, spans and splits), the layer, and the
addresses of its tensors. The content of those tensors may change between replays, within the bounds of `Spans`.
"""
