"""Quantised weights as files have them: one module for each file format, and a table of them in `formats`."""
