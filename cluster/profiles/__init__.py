"""Profiles of a running cluster: collected from its routers, as a Chrome trace, and as a table."""
