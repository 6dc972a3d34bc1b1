"""Pages where they land: converted where the forms differ, checked by their digests, committed.

landing          where a pull's bytes arrive    page_converter  converts pages, and what that takes
converted_pages  pages kept in another form     digests         digests of own pages
"""
