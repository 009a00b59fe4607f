"""The two forms in which kernels answer a question of latent attention, what each loses, and faults that are theirs.

The truth is the naive form in float64. A kernel may up-project keys and values and keep them in its dtype, as is usual
for prompts, or move the query into the latent space and attend over the cache rows themselves, as is usual for decodes;
what is rounded on the way differs. Must not know: backends, observations.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.hypotheses import Hypothesis
from attncheck.harness.latent import UpProjections
from attncheck.harness.problem import Problem
from attncheck.harness.rows import Rows
from attncheck.reference import AttentionParams, mla_params
from attncheck.reference.spec import MLASpec

Answer = tuple[Tensor, Tensor]
Attend = Callable[[Rows, AttentionParams], Answer]


def naive_rows(problem: Problem, weights: UpProjections, device: torch.device) -> Rows:
    """The question as ordinary attention over float64 keys and values: exact."""
    weights, latent, rotary = weights.to(device), problem.keys.to(device), problem.values.to(device)
    return Rows(
        problem.query.double().to(device),
        weights.keys(latent, rotary),
        weights.values(latent),
        problem.cu_seqlens_q.to(device),
        problem.cu_seqlens_k.to(device),
        None if problem.tree is None else problem.tree.to(device),
    )


def absorbed_rows(problem: Problem, weights: UpProjections, rows: Rows) -> Rows:
    """The same over cache rows: float64 queries ``[T, H, L + E]``, one KV head whose values are the latent part."""
    device = rows.query.device
    weights, latent, rotary = weights.to(device), problem.keys.to(device).double(), problem.values.to(device).double()
    nope, rope = rows.query.split([weights.w_uk.shape[2], rotary.shape[2]], dim=-1)
    query = torch.cat([torch.einsum("thp,lhp->thl", nope, weights.w_uk.double()), rope], dim=-1)
    return replace(rows, query=query, keys=torch.cat([latent, rotary], dim=-1), values=latent)


def latent_answers(
    problem: Problem, weights: UpProjections, rows: Rows, params: AttentionParams, attend: Attend
) -> Iterator[Answer]:
    """What low-precision runs of both forms answer; all that a kernel keeps is rounded to the dtype.

    ``attend``: a low-precision run of an ordinary question. ``rows`` and ``params`` are those of the naive form.
    """
    dtype = problem.dtype
    yield attend(replace(rows, keys=_through(rows.keys, dtype), values=_through(rows.values, dtype)), params)
    absorbed = absorbed_rows(problem, weights, rows)
    absorbed = replace(absorbed, query=_through(absorbed.query, dtype))
    latent_out, lse = attend(absorbed, mla_params(problem.layer).latent)
    w_uv = weights.w_uv.to(latent_out)
    yield _through(torch.einsum("thl,lhv->thv", latent_out, w_uv), dtype), lse


def latent_guesses(mla: MLASpec, rows: Rows, params: AttentionParams) -> Iterator[Hypothesis]:
    """Wrong questions that only latent layers know; ``rows`` and ``params`` are those of the naive form."""
    cached, nope = mla.kv_lora_rank + mla.qk_rope_head_dim, mla.qk_nope_head_dim
    if params.softmax_scale != cached**-0.5:
        scaled = replace(params, scale=cached**-0.5)
        meaning = f"the scale is that of a cache row, (kv_lora_rank + qk_rope_head_dim) ** -0.5 = {cached**-0.5:.4g}"
        yield Hypothesis(meaning, lambda: rows.attend(scaled))
    for meaning, part in (
        ("the rotated part of the keys is missing in the scores", slice(nope, None)),
        ("the latent part of the keys is missing in the scores", slice(0, nope)),
    ):
        keys = rows.keys.clone()
        keys[..., part] = 0.0
        yield Hypothesis(meaning, lambda keys=keys: replace(rows, keys=keys).attend(params))  # type: ignore[misc]


def _through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to ``dtype``."""
    return x.to(dtype).to(x.dtype)
