"""Run files, and the reports rendered from them; no module here imports torch.

Begin with ``run_file/records.py``, which defines the records of a run. ``analysis``, ``speeds`` and ``comparison``
evaluate records; the other folders and modules render the results in one format each. To add a format, add an entry to
``formats.py``.
"""
