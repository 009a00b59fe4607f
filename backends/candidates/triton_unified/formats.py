"""The dtypes that attncheck's own Triton kernels read and write, and the kernels' numbers for code formats."""

import torch

from attncheck.backends.candidates.triton_unified.kernels.codes import E4M3FN, E5M2

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""The float dtypes."""

CODE_FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
"""Float8 dtypes, and their formats in ``kernels.codes``; other dtypes are 0 there."""
