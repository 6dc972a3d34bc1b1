"""The gRPC endpoint: its service, and its messages as the types of the router."""
