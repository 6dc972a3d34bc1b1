"""Page forms: how a page stores the keys and values of its block. Plain numbers that need no torch, one file per form.

`table.py` has a line for each form. docs/branches/page-forms.md says how a form is added.
"""
