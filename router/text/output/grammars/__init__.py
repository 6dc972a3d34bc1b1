"""What the text of an answer that may call tools is kept to: `calls` for each format, `answers` for a whole answer."""
