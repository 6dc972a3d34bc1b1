"""Structured output: what an answer's text must match, from a client's field to a grammar that is known to compile.

fields.py          reads what clients send: `response_format`, vLLM's `structured_outputs`
output.py          what an answer must match: a kind and its text
sources.py         the table of kinds: how each becomes llguidance's form
json_schema.py     checks a schema: each keyword is enforced, or refused by name
references.py      what references within a schema lead to, what applies together, which values are equal
alternatives.py    which alternatives of `oneOf` exclude one another
closing.py         forbids the properties that a schema does not name
emptiness.py       which schemas no finite value matches
property_names.py  refuses patterns of properties with which an answer can get stuck
compile.py         one compilation, timed; a refusal is one line

The process that compiles, and what has compiled before, are in `router/preparation`.
"""
