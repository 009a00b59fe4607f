"""faults.py imports vLLM, and is no test."""

collect_ignore = ["faults.py"]
