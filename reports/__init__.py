"""Run files, and every report made from them, without torch.

Begin with ``run_file/records.py``, which holds what a run leaves behind. ``analysis``, ``speeds`` and ``comparison``
work out what records come to; the other folders and modules write that in one format each. ``formats.py`` lists the
formats: a new one is an entry there.
"""
