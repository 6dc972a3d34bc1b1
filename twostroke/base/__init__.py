"""What everything else is made with: errors, ids, digests of caches, and small helpers."""
