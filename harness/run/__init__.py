"""A run: which cases, backends and checks it has, and how they become records.

Begin with ``preparation.py``, from which every run starts, then ``evaluation.py``, which examines one case and backend
after the other. ``selection.py`` chooses cases, ``backend_choice.py`` backends, ``outcomes.py`` makes the records.
"""
