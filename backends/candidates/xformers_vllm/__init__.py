"""Candidate ``xformers_vllm``: the design of vLLM's v1 xformers backend, with what is wrong in it left in.

It runs only when named; ``docs/expected/xformers-vllm.yaml`` says what is known to be wrong. Compare
:mod:`attncheck.backends.candidates.xformers`, which declares and does what is right. Begin with ``backend``.
"""
