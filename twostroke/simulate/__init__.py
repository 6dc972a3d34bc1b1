"""Virtual time: recorded traces and logs in, and what a fleet would have made of them out."""
