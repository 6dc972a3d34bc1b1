"""Text to tokens (tokenizer, chat template), and tokens to text (detokenizer, stop strings)."""
