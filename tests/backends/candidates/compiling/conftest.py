"""The script beside the tests imports Triton, which is not everywhere: it is none of pytest's modules."""

collect_ignore = ["launches.py"]
