"""The float64 truth of a problem, the error budget around it, and references with one fault each.

Begin with ``truth``. ``unpaged`` holds attention without pages and the whole error budget. ``faults`` computes outputs
of faulty backends, which ``attncheck.harness.diagnosis`` compares with a wrong output. ``recurrent`` has truth, budget
and faults of layers with a state.
"""
