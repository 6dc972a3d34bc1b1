"""The values in tool calls: parsed from the text as it arrives, and converted to what their tool's schema admits."""
