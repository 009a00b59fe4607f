"""The right answer to a problem, the error it allows, and the wrong answers that faults produce.

Begin with ``truth``. ``tolerance`` holds the whole error budget. ``hypotheses`` and its neighbours compute what faulty
backends answer; ``explain`` compares a wrong output with them.
"""
