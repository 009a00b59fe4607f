"""The check ``timing``: how long a backend takes for one step, with defences against times that are not true.

Begin with ``check``, which makes a finding of one case. It drives ``measurement``, which times batches by
``timed_step``: one call on ``fresh_contents``, under a ``clock``, its answer judged by ``judgement``. The method and
the threat model are explained in ``docs/timing.md``.
"""
