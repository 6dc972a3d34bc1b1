"""What an answer's text means: content, reasoning and tool calls, found in the text as it comes."""
