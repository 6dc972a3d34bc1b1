"""The values in tool calls: found in the text as it comes, and made what the schema of their tool admits."""
