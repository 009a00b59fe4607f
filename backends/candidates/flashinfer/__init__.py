"""Candidate ``flashinfer``: the library's paged and ragged wrappers, planned anew for every step.

The kernels are those of its ``fa2`` family, which it compiles when they are first needed. Nothing of the library is
imported before a step is planned. It has not been run on a GPU yet: what is known of the library was read in the one
version that :mod:`~attncheck.backends.candidates.flashinfer.backend` names.
"""
