"""Whether an answer depends on what must not matter.

Begin with ``check``. ``right_rows`` judges a further step by the rows that the first step had right, and ``changes``
finds the smallest set of changes that makes it wrong. ``same_step`` hands the same step over in other ways,
``same_requests`` makes other batches of its requests, and ``history`` lets other batches come before.
"""
