"""A case as tensors: queries, keys, values, and their slots in a pool of pages, bitwise equal on every machine.

Begin with ``problem``. ``pages`` assigns keys to pages and gives the keys that a row sees, ``queries`` makes each row
attend mostly to one key, and ``storage`` rounds to what a cache can hold. ``recurrent`` has layers with a state.
"""
