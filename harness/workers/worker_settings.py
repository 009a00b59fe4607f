"""Settings of every backend process of a run."""

from dataclasses import dataclass, field

from attncheck.harness.workers.memory_limits import MemoryLimits
from attncheck.harness.workers.time_limits import TimeLimits


@dataclass(frozen=True)
class WorkerSettings:
    """``pass_env``: patterns of environment variables that a process gets in addition to the default ones."""

    limits: TimeLimits = field(default_factory=TimeLimits)
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    pass_env: tuple[str, ...] = ()
