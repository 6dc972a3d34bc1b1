"""Workers as every role has them: their tests, and the workers and callers that these use."""
