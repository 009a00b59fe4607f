"""Imported by every Python that starts with this folder on ``PYTHONPATH``.

If the variable ``ATTNCHECK_PRETEND_CUDA`` is set, it gives Python a pretend CUDA device. The variable contains the
fields of ``pretend_cuda.Settings`` as JSON. The product does not depend on it.
"""

import json
import os

if "ATTNCHECK_PRETEND_CUDA" in os.environ:
    import atexit
    from contextlib import ExitStack
    from unittest.mock import patch

    import pretend_cuda

    entered = ExitStack()
    device = entered.enter_context(
        pretend_cuda.present(pretend_cuda.Settings(**json.loads(os.environ["ATTNCHECK_PRETEND_CUDA"])))
    )
    atexit.register(device.close)

    from attncheck.harness import device as kinds

    if device.named.type == "xpu":
        from pretend_cuda.xpu import Xpu

        entered.enter_context(patch.object(kinds, "KINDS", (Xpu, *kinds.KINDS)))  # before other modules import it

    from pretend_cuda.recorder import PythonRecorder

    from attncheck.harness.checks.cudagraph import recorder

    entered.enter_context(patch.object(recorder, "DeviceRecorder", lambda _device: PythonRecorder(device)))
