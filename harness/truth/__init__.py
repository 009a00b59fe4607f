"""The float64 truth of a problem, the error budget around it, and the wrong outputs that known faults produce.

Begin with ``truth``. ``tolerance`` holds the whole error budget. ``hypotheses`` and the modules named like it compute
the outputs of faulty backends; ``explain`` compares a wrong output with them.
"""
