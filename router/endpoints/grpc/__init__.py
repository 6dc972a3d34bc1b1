"""The gRPC endpoint of our own protocol: its service, its calls, and the writer of a stream."""
