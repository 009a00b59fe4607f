"""Candidate ``flashinfer``: the library's paged and ragged wrappers, planned for every step.

The kernels are those of its ``fa2`` family, which it compiles on first use. The library is not imported before a step
is planned. On an H200 it has passed one case. All other statements about the library come from reading the version that
:mod:`~attncheck.backends.candidates.flashinfer.backend` pins.
"""
