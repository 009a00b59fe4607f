"""Counts the batches of a serving engine, and writes them as a case file.

Start at ``traffic.py``, which counts them. ``engine_hooks.py`` gives ``recorder.py`` each batch for which vLLM builds
metadata. ``layer_kinds.py`` reads the properties of layers, ``case_file.py`` writes the file, and ``plugin.py`` starts
and stops a recording.
"""
