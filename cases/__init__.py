"""The questions: batch strings, case files and the built-in suites, read without torch.

A file becomes a tree of values (``yaml_tree``, ``tree``), the tree becomes frozen :class:`~attncheck.cases.model.Case`
objects (``suite_file``, ``batch_keys``, ``validation``), and ``consistency`` and ``paths`` refuse combinations that
mean nothing. Begin with ``model``. The keys themselves are fields of the specs in ``attncheck.reference.spec``.
"""
