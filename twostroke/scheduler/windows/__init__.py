"""What sequences do with window parts.

progress  the window parts that a sequence holds; which blocks it computes, writes and passes over
places    where a step finds and writes window parts
"""
