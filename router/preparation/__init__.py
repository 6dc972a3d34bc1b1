"""The work on a request before it is admitted: parse, check, render, tokenize."""
