"""Which tools an answer may call, in which format, and the grammar that a forced call keeps to."""
