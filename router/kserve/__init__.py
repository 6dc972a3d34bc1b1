"""The endpoints of KServe's protocol v2: pages over HTTP, and the service over gRPC."""
