"""Our own gRPC messages as the types of the router."""
