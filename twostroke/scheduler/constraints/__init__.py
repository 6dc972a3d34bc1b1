"""Features that change the steps of sequences. The scheduler imports none of them: they are handed to it.

exact_blocks    tokens see their own block exact, where pages hold it rounded
scored_prompt   logprobs of a prompt
adapted         an adapter that has to be loaded
grammar_run     an answer that matches a grammar, and runs of tokens that it forces
drafting        tokens that drafters propose; draft_rows and model_drafting: what a draft model computes
"""
