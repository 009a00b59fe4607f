"""Candidate ``xformers_vllm``: the design of vLLM's v1 xformers backend, including its faults.

It runs only if named; ``docs/expected/xformers-vllm.yaml`` lists the known faults. Compare
:mod:`attncheck.backends.candidates.xformers`, which declares only what is correct. Begin with ``backend``.
"""
