"""Tests. A package, so that no other package of this name hides it from `python -m tests.trials.gpu.bench`."""
