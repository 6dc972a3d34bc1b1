"""Page forms on a worker.

branch              exact values beside the pages of unfinished blocks, and pulls between workers of two forms
converted_pages     pages kept in another form, for those that pull them
converting_landing  pages of another form that arrive
page_converter      converts pages, and measures how long that takes
"""
