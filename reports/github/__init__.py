"""Reports for GitHub Actions: a step summary in Markdown, and annotations printed to the log.

Begin with ``run.py`` for runs and ``comparison.py`` for a comparison; ``annotations.py`` escapes the commands of both.
"""
