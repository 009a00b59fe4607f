"""Reports as Markdown, with nothing cut.

Begin with ``run.py`` for a run and ``comparison.py`` for a comparison; each other module renders one section.
``markup.py`` escapes a backend's text, so that it cannot become markup.
"""
