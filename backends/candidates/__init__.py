"""attncheck's own candidates, one module or folder each; ``registry.BUILTIN`` lists them.

``torch_sdpa`` is the smallest to read. In a folder, begin with ``backend``, which declares the candidate's features.
"""
