"""Grammars of answers that may call tools: `calls` has what formats share, `answers` makes that of a whole answer."""
