"""The candidates that attncheck brings along, one module or folder each; ``registry.BUILTIN`` lists them.

``torch_sdpa`` is the smallest to read. In a folder begin with ``backend``: it declares what the candidate does.
"""
