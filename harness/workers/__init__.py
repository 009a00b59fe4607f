"""Execution: each backend of a run in a process of its own."""
