"""LoRA adapters, read from folders that PEFT wrote. An adapter is its bytes: everybody knows it by their digest.

`peft` reads and checks, `shapes` says what fits a model, `store` keeps copies by digest. None of these loads torch:
routers read adapters too. `products` is what a model on a worker adds to its own products.
"""
