"""The check ``timing``: how long a backend takes for one step, with defences against manipulated times.

Start with ``check``, which times batches and returns the finding of one case. ``contents`` makes new contents for each
timed step and judges its output, ``clock`` times it, and ``roofline`` sets the time in relation to the device.
``docs/timing.md`` explains the method and the threat model.
"""
