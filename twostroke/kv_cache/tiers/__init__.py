"""Tiers below the pool: copies of pages in host memory and on disk. Pure Python, no torch.

record      one page on disk: a header that says what it is, then its bytes
files       segment files: aligned reads and writes, direct I/O where the file system allows it
folders     folders of segments: who owns them, what their headers say, torn tails cut
trust       which folders are read: only those that no other user can write to
disk_store  which block lies where on disk, and which segment is reclaimed when space is needed
host_store  pages in host memory; the least recently used is evicted first
sightings   how often blocks were seen lately
byte_budget bytes that may be written in a second
"""
