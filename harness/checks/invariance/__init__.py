"""The check ``invariance``: whether an output depends on something that must not matter.

Start with ``check``. ``right_rows`` judges later steps on the rows that were right in the first step. ``changes`` finds
the smallest set of changes that makes a step wrong. ``same_step`` passes the same step in other ways, ``same_requests``
rearranges the requests of a batch, and ``history`` runs other batches first.
"""
