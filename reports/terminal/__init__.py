"""Reports as plain text for a terminal, 100 columns wide by default.

Begin with ``run.py``; ``text.py`` renders the blocks of a document, ``columns.py`` aligns and wraps text.
"""
