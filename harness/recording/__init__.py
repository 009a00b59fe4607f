"""Batches of a serving engine, counted while it serves, and written as a case file.

Begin with ``traffic.py``, which counts them. ``engine_hooks.py`` has ``recorder.py`` see each batch that vLLM builds
metadata of. ``layer_kinds.py`` reads what the layers are, ``case_file.py`` writes the file, ``plugin.py`` begins and
ends.
"""
