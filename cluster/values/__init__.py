"""What several rooms of the cluster exchange: a fleet's specification, its desired state, counts, nodes. Pure."""
