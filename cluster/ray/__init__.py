"""Everything that asks Ray: which cluster is meant, how it is joined, where actors go, and what Ray's store keeps."""
