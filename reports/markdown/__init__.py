"""Reports as Markdown, with nothing cut.

Begin with ``run.py`` for a run and ``comparison.py`` for a comparison; the other modules write one section each.
``markup.py`` escapes what backends said, so that it cannot become markup.
"""
