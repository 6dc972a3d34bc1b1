"""The page group of layers with a window: a token sees only the last blocks.

shape         the slots of the group, and how many blocks a token sees
window_group  the pages of the group, its *window parts*: what is held, evicted and pinned of them
pool_share    how many pages of a pool's memory are the window group's
"""
