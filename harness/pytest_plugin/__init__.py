"""The pytest plugin: checks of cases as pytest items. Every pytest run imports this package, so it must stay light.

Start at ``plugin.py``, which adds the options. It loads ``items.py`` if an option or a module requests items.
"""
