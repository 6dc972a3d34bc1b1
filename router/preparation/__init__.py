"""Everything that a request costs before it is admitted: parse, check, render, tokenize."""
