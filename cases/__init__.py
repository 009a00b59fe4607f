"""Cases: batch strings, case files and the built-in suites, read without torch.

``yaml_tree`` and ``tree`` parse a file into a tree of values. ``suite_file``, ``case_keys``, ``batch_keys``,
``company_keys`` and ``validation`` turn the tree into frozen :class:`~attncheck.cases.model.Case` objects.
``consistency`` and ``paths`` reject invalid combinations. Begin with ``model``. The keys themselves are fields of the
specs in ``attncheck.reference.spec``.
"""
