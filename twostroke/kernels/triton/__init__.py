"""Attention over pages on a CUDA device, written in Triton. Each kernel has a reference in `kernels/reference.py`.

store.py        rope on q and k; k and v into their slots
decode.py       few query rows over long contexts: the context is split among programs, a second kernel merges
prefill.py      tiles of query rows over pages, causal by position
grouped.py      products of experts over rows that are sorted by expert
codes.py        products with weights that stay codes
elementwise.py  norms with their residual sum, the gated product
bytes.py        numbers of one byte: decoded after a load, encoded before a store
rules.py        what layers see, their soft caps and sinks
attention.py    the backend: which span goes to which kernel
nibbles.py, nibble_spans.py, nibble_attention.py    the same for pages of 4-bit numbers, whose blocks are stored whole

Every launch reads slots, lengths and block tables on the device and never waits for the device. So all launches can be
captured in a CUDA graph. A captured graph keeps the grid (how many tokens, spans and splits), the layer, and the
addresses of its tensors. The content of those tensors may change between replays, within the bounds of `Spans`.
"""
