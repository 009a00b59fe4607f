"""How pytest-xdist hands out our items: all checks of one case and backend go to the same worker.

The ``xdist_group`` mark says the same, but counts only under ``--dist loadgroup``, and releases of pytest and
pytest-xdist do not always agree on how (pytest 9.2 ignores what pytest-xdist 3.8 does to node ids). Imported only
where pytest-xdist runs. Must not know: what the items examine.
"""

from importlib import import_module
from typing import Any

_Base: Any = import_module("xdist.scheduler").LoadGroupScheduling  # pytest-xdist has no types


class PairScheduling(_Base):  # type: ignore[misc]
    """Load balancing, one case and backend at a time; foreign tests go one by one, or by their group."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("attncheck::"):
            return nodeid.partition("@")[0].rpartition("::")[0]
        return str(super()._split_scope(nodeid))
