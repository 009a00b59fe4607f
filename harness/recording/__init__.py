"""Counts the batches of a serving engine, and writes them as a case file.

Start at ``traffic.py``, which counts them and writes the file. ``plugin.py`` starts and stops a recording, and gives
``recorder.py`` each batch for which vLLM builds metadata. ``kept_file.py`` writes a file while an engine serves.
"""
