"""What a worker has measured: the costs of its steps, the links from its peers, the limits of its machine."""
