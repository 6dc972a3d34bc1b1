"""Structured output: what an answer's text must match, from a client's field to a grammar that is known to compile.

fields.py          reads what clients send: `response_format`, vLLM's `structured_outputs`
output.py          what they ask for: a kind and its text
sources.py         the table of kinds: how each becomes llguidance's form
json_schema.py     which schemas can be kept to, and which keyword of the others cannot
references.py      what references within a schema lead to, what applies together, which values are equal
alternatives.py    which alternatives of `oneOf` exclude one another
closing.py         forbids what a schema leaves out, where it names properties
emptiness.py       which schemas no finite value matches
property_names.py  which patterns of properties leave an answer no way on
compile.py         one compilation, timed; a refusal is one line

The process that compiles, and what has compiled before, are in `router/preparation`.
"""
