"""Structured output: what an answer's text must match, from a client's field to a grammar that is known to compile.

fields.py       reads what clients send: `response_format`, vLLM's `structured_outputs`
output.py       what they ask for: a kind and its text
sources.py      the table of kinds: how each becomes llguidance's form
json_schema.py  which schemas can be kept to, and which keyword of the others cannot
compile.py      one compilation, timed; a refusal is one line
process.py      the process that compiles: it may be ended at any time, and has little memory
compiled.py     what has compiled before, by digest; metrics
"""
