"""What routers of one launcher share besides their ports: memory in which each writes its own counts."""
