"""How many workers of each role there are, and how that changes.

roster    who shall be there, in which role: written down, so that a restarted supervisor goes on with it
changes   from the roster and wanted counts to who comes, goes, or becomes the other role: pure
"""
