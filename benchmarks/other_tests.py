"""Find wrong backends by tests in the manner of three other projects.

Each project contributes its rule and its batches. All of them run over attncheck's own driver, so that one backend can
take every test:

* vLLM's ``tests/v1/attention/test_attention_backends.py``: named batches, a cache of zeros, ``assert_close`` at 1e-2.
* FlashInfer-Bench: paged decode and prefill, pages of 1 and 64 tokens. An element is wrong if its absolute and its
  relative error both exceed 1e-2. The share of right elements must reach the required one, 1.0 by default.
* FlashAttention's ``tests/test_flash_attn.py``: windows, soft caps and ALiBi. The largest error must be at most twice
  that of plain torch in the same dtype.

Inputs are normally distributed. Layers have 8 query heads, 2 KV heads and head size 64, so that a CPU can run them;
the projects use larger ones. A backend is run only on layers it declares. An exception counts as found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.grammar import parse_batch
from attncheck.cases.model import Case
from attncheck.harness.driver.foreign_code import StageError, unsupported_reasons
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import params_of, rows_of
from attncheck.reference import Precision
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

CPU = torch.device("cpu")

_VLLM_CAUSAL = (
    "q1s32_q1s40",
    "q8s32_q8s40",
    "q1s32_q1s40_q5s48_q5s56",
    "q1s128_q1s256_q1s512_q1s1k_q1s128_q1s256_q1s512_q1s1k",
    "q16s256_q16s512_q16s1k_q16s2k",
    "q1s512_q1s1k_q1s2k_q7s512_q7s1k_q7s2k",
    "32q1s2k",
    "8q32s4k",
    "q1s1k",
    "q64s1k",
)
_VLLM_WINDOW = (*_VLLM_CAUSAL[:2], _VLLM_CAUSAL[5], *_VLLM_CAUSAL[6:8], "q1s1k_q1s2k_q1s4k_q32s1k_q32s2k_q32s4k")
_VLLM_ENCODER = ("q32_q64_q128_q256", "q256_q512_q1k_q2k")

_BENCH_DECODE = ("q1s7", "16q1s1k", "q1s34_q1s1k_q1s233_q1s2k_q1s5_q1s811", "64q1s300")
_BENCH_PREFILL = ("q17_q64_q5", "q128s512_q7s2k", "q1k")

_FLASH_LENGTHS = ("2q1s128", "2q1s339", "2q3s1k", "2q64s800", "2q64s256", "2q3s799", "2q64s2k")
_FLASH_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 97},
    {"logits_soft_cap": 50.0},
    {"alibi": True},
    {"num_kv_heads": 8},
    {"num_kv_heads": 1, "dtype": "bfloat16"},
)

Rule = Callable[[Tensor, Tensor, Tensor], bool]
"""(output, truth, output of plain torch in the same dtype) -> whether the output passes; all float32."""


@dataclass(frozen=True)
class OtherTest:
    """One case of another project's tests, and the rule that its output must pass."""

    project: str
    problem: Problem
    right: Tensor
    plain: Tensor
    passes: Rule

    def finds(self, backend: type[AttentionBackend]) -> bool:
        """Return whether the test fails for ``backend``; False if the backend does not declare the layer."""
        if unsupported_reasons(backend, self.problem.case):
            return False
        try:
            seen = Session(backend, self.problem, CPU).run(Fill(poison=0.0, padding=0.0), images=False)
        except StageError:
            return True
        return not self.passes(seen.output.float(), self.right, self.plain)


def other_tests() -> Iterator[OtherTest]:
    """Yield every test of the three projects."""
    causal = partial(_layer, dtype="bfloat16")
    for batch in _VLLM_CAUSAL:
        yield _test("vLLM", batch, causal(), 16, is_close)
    for batch in _VLLM_WINDOW:
        yield _test("vLLM", batch, causal(sliding_window=128), 16, is_close)
    for batch in _VLLM_ENCODER:
        yield _test("vLLM", batch, causal(attn_type=AttentionType.ENCODER_ONLY), 16, is_close)
    for block_size in (1, 64):
        for batch in (*_BENCH_DECODE, *_BENCH_PREFILL):
            yield _test("FlashInfer-Bench", batch, causal(), block_size, matches)
    for variant in _FLASH_VARIANTS:
        for batch in _FLASH_LENGTHS:
            yield _test("FlashAttention", batch, _layer(**variant), 16, is_near_plain)


def is_close(answer: Tensor, right: Tensor, _plain: Tensor) -> bool:
    """Return whether all elements are finite and within 1e-2 + 1e-2 * |right|."""
    return bool(answer.isfinite().all()) and bool(((answer - right).abs() <= 1e-2 + 1e-2 * right.abs()).all())


def matches(answer: Tensor, right: Tensor, _plain: Tensor) -> bool:
    """Return whether all elements are finite, and none has absolute and relative errors that both exceed 1e-2."""
    error = (answer - right).abs()
    return bool(answer.isfinite().all()) and not bool(((error > 1e-2) & (error / (right.abs() + 1e-8) > 1e-2)).any())


def is_near_plain(answer: Tensor, right: Tensor, plain: Tensor) -> bool:
    """Return whether the largest error is at most twice that of plain torch, plus 1e-5."""
    return bool((answer - right).abs().max() <= 2 * (plain - right).abs().max() + 1e-5)


def _layer(**fields: Any) -> LayerSpec:
    return LayerSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "float16"} | fields)


def _test(project: str, batch: str, layer: LayerSpec, block_size: int, rule: Rule) -> OtherTest:
    case = Case(
        suite=project,
        id=f"{batch}.{block_size}",
        layer=layer,
        cache=CacheSpec(block_size=block_size),
        batch=BatchSpec(requests=parse_batch(batch)),
        inputs=(),
    )
    problem = build_problem(case, 0)
    generator = torch.Generator().manual_seed(42)
    drawn = {
        name: torch.randn(getattr(problem, name).shape, generator=generator).to(problem.dtype)
        for name in ("query", "keys", "values")
    }
    problem = replace(problem, **drawn)
    rows, params = rows_of(problem, CPU), params_of(problem)
    right, _ = rows.attend(params, Precision(torch.float32))
    plain, _ = rows.attend(params, Precision(problem.dtype, problem.dtype, problem.dtype))
    return OtherTest(project, problem, right.float(), plain.float(), rule)
