"""What every process of a run's backends is started with."""

from dataclasses import dataclass, field

from attncheck.harness.workers.memory_limits import MemoryLimits
from attncheck.harness.workers.time_limits import TimeLimits


@dataclass(frozen=True)
class WorkerSettings:
    """``pass_env``: patterns of the environment variables that a process gets besides the usual ones."""

    limits: TimeLimits = field(default_factory=TimeLimits)
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    pass_env: tuple[str, ...] = ()
