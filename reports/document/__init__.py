"""The content of a report for people, without its format: sections of a run, as blocks that each text format renders.

Begin with ``run.py``; ``blocks.py`` has the kinds of blocks. Each other module has one or a few sections.
"""
