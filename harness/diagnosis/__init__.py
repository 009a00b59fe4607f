"""The likely cause of a wrong output, in words: known faults, and faults fitted to the error.

Begin with ``explain``. ``scores``, ``operands`` and ``paging`` compute what known faults would give. ``fitted`` finds a
fault from the wrong rows, heads, keys and channels, which ``patterns`` states in words.
"""
