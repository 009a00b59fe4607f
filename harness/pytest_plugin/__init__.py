"""The pytest plugin: checks of cases as pytest items. Every pytest run imports this package: nothing heavy here.

Begin with ``plugin.py``, which adds the options; ``items.py`` is loaded when one of them is given.
"""
