"""Settings of every test: property tests repeat exactly, and no machine is too slow for one."""

from hypothesis import settings

settings.register_profile("attncheck", derandomize=True, deadline=None, database=None)
settings.load_profile("attncheck")
