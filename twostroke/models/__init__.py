"""The models that are served: their specs, their files, their weights and the decoders that compute them.

`spec` and `catalog.places` never load torch: routers and launchers use them too.
"""
