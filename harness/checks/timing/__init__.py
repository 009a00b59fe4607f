"""Timing: clocks, samples, contents that are new at every call, and what a time is worth."""
