"""Candidate ``xformers_vllm``: the design of vLLM's v1 xformers backend, with what is wrong in it left in.

It is here to be found out: it runs only when named, and ``docs/expected/xformers-vllm.yaml`` says what is known of it.
Compare :mod:`attncheck.backends.candidates.xformers`, which declares and does what is right. Must not know: the
harness.
"""
