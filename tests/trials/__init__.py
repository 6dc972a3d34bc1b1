"""Programs that try the product for longer than the gate may take: faults, loads, clients, GPUs, schemas.

Their quick tests are in the gate; `make help` names the commands that run the rest.
"""
