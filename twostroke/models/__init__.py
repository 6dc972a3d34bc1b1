"""Which models are served, where their files lie, and their straight-line native form.

`spec` and `catalog.places` never load torch: routers and launchers use them too.
"""
