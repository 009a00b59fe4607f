"""Why a backend of vLLM's cannot run here, as vLLM itself sees it, and what its process must be started with.

Must not know: cases, layers.
"""

from typing import Any

import torch

from attncheck.backends import interpreter
from attncheck.backends.candidates.vllm import interpreted, package


def unavailable_reasons(their_backend: type[Any], device: str) -> list[str]:
    """Every reason why ``their_backend`` cannot run on ``device`` with the installed vLLM; empty: none is known."""
    kind, platform = torch.device(device).type, package.platform()
    if platform.device_type != kind:
        return [f"device {device}: vLLM {package.version()} is built for {platform.device_type or 'no device'} here"]
    reasons = []
    capability = platform.get_device_capability()
    supports = getattr(their_backend, "supports_compute_capability", None)
    # Without a GPU there is none to compare: a class that needs one does not support the lowest.
    if supports is not None and not supports(capability or package.lowest_capability()):
        found = "there is none" if capability is None else f"this one has {capability.as_version_str()}"
        reasons.append(f"vLLM's class names the compute capabilities of GPUs that it supports, and {found}")
    if interpreted.launches_triton(their_backend):
        reasons += interpreted.missing_triton()
    return reasons


def required_environment(their_backend: type[Any], device: str) -> dict[str, str]:
    """What must stand before Python starts: on a CPU, that Triton interprets kernels."""
    return interpreter.required_environment(device) if interpreted.launches_triton(their_backend) else {}


def is_interpreted(their_backend: type[Any]) -> bool:
    """Whether the backend's kernels run by Triton's interpreter in this process."""
    return interpreter.is_interpreted() and interpreted.launches_triton(their_backend)


def version(their_backend: type[Any]) -> str:
    """vLLM's, with a mark where verdicts are about interpreted kernels."""
    return interpreter.marked(package.version()) if is_interpreted(their_backend) else package.version()


def default_suite(their_backend: type[Any], device: str) -> str:
    """The suite that is asked where the user names none."""
    return interpreter.default_suite(device) if interpreted.launches_triton(their_backend) else "smoke"
