"""LoRA adapters, read from folders that PEFT wrote. An adapter is identified by a digest of its content.

`peft` reads and checks, `shapes` says what fits a model, `store` keeps copies by digest. None of these loads torch:
routers read adapters too. `products` computes what adapters add to a model's matrix products.
"""
