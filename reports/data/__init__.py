"""Tables for other programs: runs and comparisons as JSON, records as CSV.

``rows.py`` computes a row for each record. ``documents.py`` assembles the JSON documents.
"""
