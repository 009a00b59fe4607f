"""The candidates: the contract they implement, the registry that finds them, and the ones attncheck brings along.

- ``contract``, ``impl``: what a backend is; ``conventions``: differences that are not bugs; ``quantkey``;
- ``declarations``: what a backend says it supports, held against a case;
- ``packings``, ``codecs``: how a KV cache is laid out, written and read;
- ``registry``, ``verification``: from a name to a class that keeps the contract's form;
- ``kernel``: a bare function as a backend;
- ``paged``, ``paged_metadata``, ``refusals``, ``gathering``: what our own candidates share;
- ``reference_backend``, ``torch_sdpa``, ``flex_attention``: those candidates.

Importing this package imports none of them. Must not know: suites, checks, records, the harness.
"""
