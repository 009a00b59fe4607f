"""Cases: batch strings, case files and the built-in suites, read without torch.

``yaml_tree`` parses a file into a tree of values. ``suite_file``, ``keys`` and ``validation`` turn the tree into frozen
:class:`~attncheck.cases.model.Case` objects. ``consistency`` rejects invalid combinations. Begin with ``model``. The
keys themselves are fields of the specs in ``attncheck.reference.spec`` and ``step_spec``. ``telling`` has the order of
``--within``.
"""
