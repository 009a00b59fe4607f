"""The check ``timing``: how long a backend takes for one step, with defences against manipulated times.

Start with ``check``, which returns the finding of one case. It runs ``measurement``, which times batches with
``timed_step``: one call on ``fresh_contents``, timed by a ``clock``, with its output judged by ``judgement``.
``docs/timing.md`` explains the method and the threat model.
"""
