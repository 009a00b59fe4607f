"""The pytest plugin: checks of cases as pytest items. Every pytest run imports this package: nothing heavy here.

Begin with ``plugin.py``, which adds the options. It loads ``session.py`` where an option or a module asks for items.
"""
