"""LoRA adapters in the engine: the slots that hold them, for real models, paced models and workers of several
processes."""
