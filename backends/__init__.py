"""The backends that can be examined: the contract, what backends may share, and the candidates of attncheck's own.

Begin with ``contract`` (what a backend is), then ``candidates/torch_sdpa`` (a small one). ``registry`` turns a name
into a class; ``declarations`` compares a class with a case; ``caches`` writes and reads KV caches from outside.
Importing this package imports none of them.
"""
