"""The path ``ranks``: decode context parallelism with a process for each rank. Begin with ``check``."""
