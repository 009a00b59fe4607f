"""The backends under test: the contract, shared helpers for backends, and attncheck's own candidates.

Begin with ``contract`` (what a backend is), then ``candidates/torch_sdpa`` (a small example). ``registry`` maps a name
to a class, ``declarations`` compares a class with a case, and ``caches`` writes and reads KV caches from outside the
backend. Importing this package imports none of these modules.
"""
