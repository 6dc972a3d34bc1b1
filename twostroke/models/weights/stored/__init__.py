"""Quantised weights in files: one module for each file format, and a table of them in `formats`."""
