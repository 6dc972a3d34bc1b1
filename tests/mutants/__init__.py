"""Mutants: the product with one mistake in it, each of which some test notices. `make mutants` runs them.

mutant   a row: the claim that the mistake breaks, the text that it changes, the test that notices
table    the rows, a file for each part of the product; they were chosen from docs/claims.md, before any test was read
bench    copies of the tree, in which a mutant is made, its test run, and the tree mended again
run      all or some mutants, several at a time, and what came of them

The gate checks rows alone: that each text is in its file exactly once, and that its test is there.
"""
