"""Reports as Markdown, with nothing cut.

Begin with ``run.py``; ``text.py`` renders the blocks of a document. ``markup.py`` escapes a backend's text, so that it
cannot become markup.
"""
