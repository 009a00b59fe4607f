"""Time backends on the pretend device, and print the waits and copies between a hold and the second event after it.

Run it with this folder on the path, as ``timed_on_pretend.py SUITE BACKEND...``. The device must exist before attncheck is
imported, since attncheck takes its clocks at import.
"""

import json
import sys
from dataclasses import asdict
from unittest.mock import patch

from pretend_cuda import Act, Settings, present
from pretend_cuda.recorder import PythonRecorder

SMALL = Settings(total_memory=24 * 2**20, l2_cache_size=2**20)
"""Small, since ceilings are measured on an eighth of the memory and flushes write twice the cache size, on the CPU."""


def held_acts(acts: list[Act]) -> list[list[Act]]:
    """Return the acts between each hold and the second event after it, without events."""
    found: list[list[Act]] = []
    num_events = 2
    for act in acts:
        if act.kind == "hold":
            num_events = 0
            found.append([])
        elif act.kind == "event":
            num_events += 1
        elif num_events < 2:
            found[-1].append(act)
    return found


def main(suite: str, *backends: str) -> None:
    found = []
    with present(SMALL) as device:
        import attncheck
        from attncheck.harness.checks.cudagraph import recorder
        from attncheck.harness.checks.findings import TimingSettings

        settings = TimingSettings(min_samples=5, max_samples=5, kernels=True)
        with patch.object(recorder, "DeviceRecorder", lambda _device: PythonRecorder(device)):
            for backend in backends:
                device.acts.clear()
                examined = attncheck.examine(backend, suite, checks="timing", device="cuda", timing=settings)
                (record,) = examined.records
                held = [[asdict(act) for act in acts] for acts in held_acts(device.acts)]
                found.append({"record": record.model_dump(mode="json"), "held": held})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
