"""Checks of Kubernetes manifests, offline.

render      kustomize builds an overlay; objects are read strictly (a key that is there twice is an error)
schemas     native kinds against the API's schemas, custom kinds against their CRDs: no unknown field
cel         the rules that CRDs carry, over objects with the schema's defaults
the rest    what an API server, an operator, a kubelet or our own program would say only once it runs

A check is a function that yields complaints; its name is the name of the check. `checks.py` lists them all.
"""
