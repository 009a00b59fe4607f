"""A case as tensors: queries, keys, values, and their slots in a pool of pages, bitwise equal on every machine.

Begin with ``problem``. ``page_layout`` assigns keys to pages, ``queries`` makes each row attend mostly to one key,
``storage`` rounds to what a cache can hold, ``visible_span`` gives the keys that a row sees.
"""
