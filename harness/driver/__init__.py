"""Drive a backend through the contract as a model runner does, and record what it did.

Begin with ``session.py``, which constructs a backend and makes its calls. ``step.py`` makes the inputs, ``pool.py`` the
cache and ``outputs.py`` the output buffers. ``foreign_code.py`` enters the backend's code, and ``observation.py`` holds
the result. ``recurrent.py`` drives layers with a state.
"""
