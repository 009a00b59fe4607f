"""An XPU as attncheck would know it: one class. It shows what another kind of device takes."""

from attncheck.harness.device import Accelerator, Facts
from pretend_cuda.clock import CYCLES_PER_NS


class Xpu(Accelerator):
    """The pretend device as an XPU. Unlike CUDA, it reports no waits, and has neither modes nor a state."""

    type = "xpu"
    graph_class = "XPUGraph"
    remedy = "repeat with one kernel at a time"

    @classmethod
    def absence(cls) -> str:
        return ""

    @classmethod
    def visible_variables(cls) -> tuple[str, ...]:
        return ("ZE_AFFINITY_MASK",)

    def facts(self) -> Facts:
        found = self.properties
        return Facts(found.name, None, found.total_memory, found.L2_cache_size)

    def hold(self, ns: int) -> None:
        self.references()._sleep(ns * CYCLES_PER_NS)

    def release_pool(self, pool: object) -> None:
        pass
