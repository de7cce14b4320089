"""The mirror's table of keys as machine code: `key_entries.py` has what Python calls, `context.py` what they work on.

Reading order: context, rows, holders, then changing, depths, walking, moving, and the entries.

A table belongs to one process. One thread writes it, any number look things up. They need no lock of their own,
because an entry keeps the interpreter's lock while it runs, so each call sees the table between two others. Only
`moving.py` works without that lock, and it only reads what the others read as well.
"""
