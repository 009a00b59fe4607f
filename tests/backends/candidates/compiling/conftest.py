"""The scripts beside the tests import Triton, which is not everywhere: they are none of pytest's modules."""

collect_ignore = ["launches.py", "census.py", "flex_calls.py"]
