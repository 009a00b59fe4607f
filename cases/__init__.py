"""The questions: batch strings, case files and the built-in suites, read without torch.

A file becomes a tree of values (``yaml_tree``, ``tree``), and the tree becomes frozen
:class:`~attncheck.cases.model.Case` objects (``suite_file``, ``case_keys``, ``batch_keys``, ``company_keys``,
``validation``). ``consistency`` and ``paths`` refuse combinations that mean nothing. Begin with ``model``. The keys
themselves are fields of the specs in ``attncheck.reference.spec``.
"""
