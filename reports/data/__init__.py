"""Tables for other programs: runs and comparisons as JSON, records as CSV.

``rows.py`` has a row for each record. ``documents.py`` puts the JSON documents together.
"""
