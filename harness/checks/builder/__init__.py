"""The check ``builder``: what a metadata builder changes, what it shares, and what it waits for.

Nothing is imported here.
"""
