"""Judges every attention row of a serving engine against attention that knows no page, slot or table.

Start at ``events.py``, the types, and ``observer.py``, which follows an engine and judges it. ``history.py``
follows requests, tokens and positions; ``judge.py`` keeps keys and values and compares outputs, ``pages.py``
compares pages, and ``causes.py`` explains a wrong row. ``vllm_runner.py`` gives the observer what vLLM's worker
does, and ``vllm_facts.py`` what its objects mean. ``graphs.py`` copies rows within CUDA graphs. ``plugin.py`` and
``served_engine.py`` watch a server; ``traffic.py`` serves requests of our own.
"""
