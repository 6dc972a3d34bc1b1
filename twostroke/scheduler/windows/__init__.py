"""What sequences do with window parts.

held      the window parts that a running sequence holds
progress  which blocks it computes, writes and passes over
places    where a step finds and writes window parts
"""
