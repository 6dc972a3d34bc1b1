"""The kernels of page forms: pools, attention, and conversions between forms. `form_kernels.py` is their interface."""
