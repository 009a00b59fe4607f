"""The candidates: the contract they implement, the registry that finds them, and the ones attncheck brings along.

``contract`` what a backend is · ``conventions`` differences that are not bugs · ``declarations`` what a backend says it
supports, held against a case · ``packings``, ``codecs`` how a KV cache is laid out, written and read · ``registry``,
``verification`` from a name to an examined class · ``kernel`` a bare function as a backend · ``paged``, ``refusals``
what our own candidates share · ``reference_backend``, ``torch_sdpa``, ``flex_attention`` those candidates.

Importing this package imports none of them. Must not know: suites, checks, records, the harness.
"""
