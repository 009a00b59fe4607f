"""A case as tensors: queries, keys, values, and their places in a pool of pages. The same bits on every machine.

Begin with ``problem``. ``page_layout`` places keys in pages, ``queries`` points rows at keys, ``storage`` rounds to
what a cache holds, ``visible_span`` gives the keys that a row sees.
"""
