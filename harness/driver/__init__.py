"""Driving a backend through the contract, as a model runner does, and seeing what it did.

Begin with ``session.py``, which constructs a backend and makes its calls. ``step.py`` and ``forward_calls.py`` make
what it is handed, ``foreign_code.py`` enters its code, ``observation.py`` is what was seen.
"""
