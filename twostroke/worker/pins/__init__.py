"""Life of a pin on a worker.

PUT        the caps allow it: its blocks are marked, and kept from eviction as they come
COMPUTING  what is missing is a sequence like any other: it waits for pages, is pulled or computed, and then ends
READY      every block is here; admissions that find all of them are counted
FAILED     a step that computed it fails each time; what is here of it stays
ENDED      it was removed or has expired: its blocks are cached blocks like others

The supervisor remembers pins and gives them to every epoch. A cache hint of a request is a pin that the request itself
computes, and that ends with the epoch.
"""
