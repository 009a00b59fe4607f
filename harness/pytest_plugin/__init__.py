"""The pytest plugin. Every pytest run imports this package: nothing heavy here."""
