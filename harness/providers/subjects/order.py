"""Questions about the order of a batch: where decodes end, and which requests move to the front."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attncheck.harness.providers.batches import ProviderBatch
from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call
from attncheck.reference import PrefillingMetadata
from attncheck.reference.utilities.batch_order import split_finished_prompts

HOST = torch.device("cpu")
THRESHOLDS = (1, 2, 4)

Numbers = tuple[int, ...]


def _boundaries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(
        batch: ProviderBatch, threshold: int, *tags: str, uniform: bool = False, spare: int = 0, refused: bool = False
    ) -> SubjectCall:
        metadata = batch.metadata(setting.device)
        uniformly = ", uniform" if uniform else ""
        bound = f", max_query_len {spare} above the truth" if spare else ""
        return subject_call(
            f"{batch}: threshold {threshold}{uniformly}{bound}",
            *tags,
            refused=refused,
            common_attn_metadata=replace(metadata, max_query_len=metadata.max_query_len + spare),
            decode_threshold=threshold,
            require_uniform=uniform,
        )

    for batch in setting.batches:
        for threshold in THRESHOLDS:
            yield call(batch, threshold)
            yield call(batch, threshold, uniform=True)
        yield call(batch, 1, spare=3)
        yield subject_call(f"{batch}: by default", common_attn_metadata=batch.metadata(setting.device))
        yield from _flagged(batch, setting.device)
    yield call(setting.batches[0], -1, "malformed", refused=True)


def _flagged(batch: ProviderBatch, device: torch.device) -> Iterator[SubjectCall]:
    """Yield questions that count short extends as prefills, with a few patterns of requests with unfinished prompts."""
    real = [tokens > 0 for tokens in batch.query_lens]
    fresh = [q == s > 0 for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)]
    last = [place == sum(real) - 1 for place in range(len(real))]
    patterns = {
        "no prompt is": [False] * len(real),
        "prompts of first chunks are": fresh,
        "the last prompt is": last,
        "every second prompt is": [flag and place % 2 == 1 for place, flag in enumerate(real)],
    }
    for text, flags in patterns.items():
        metadata = batch.metadata(device)
        shared = {each.name: getattr(metadata, each.name) for each in fields(metadata)}
        for threshold, uniform in product(THRESHOLDS, (False, True)):
            yield subject_call(
                f"{batch}: threshold {threshold}{', uniform' if uniform else ''}, {text} unfinished, and no decode",
                common_attn_metadata=PrefillingMetadata(**shared, is_prefilling=torch.tensor(flags)),
                decode_threshold=threshold,
                require_uniform=uniform,
                treat_short_extends_as_decodes=False,
            )


def _three_parts(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        for threshold in THRESHOLDS:
            yield subject_call(
                f"{batch}: threshold {threshold}",
                *(["first chunks"] if _has_first_chunk(batch, threshold) else []),
                common_attn_metadata=batch.metadata(setting.device),
                decode_threshold=threshold,
            )
        metadata = batch.metadata(setting.device)
        tag = "decodes alone" if max(batch.query_lens) <= 1 else "first chunks" if _has_first_chunk(batch, 1) else ""
        yield subject_call(
            f"{batch}: max_query_len 3 above the truth, by default",
            tag,
            common_attn_metadata=replace(metadata, max_query_len=metadata.max_query_len + 3),
        )


def _has_first_chunk(batch: ProviderBatch, threshold: int) -> bool:
    return any(q == s > threshold for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))


def _workspaces(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        longest, together = max(batch.seq_lens), sum(batch.seq_lens)
        for size in dict.fromkeys((longest, longest + 1, 2 * longest, together)):
            yield subject_call(
                f"{batch}: a workspace of {size}",
                seq_lens_cpu=batch.metadata(HOST).seq_lens_cpu,
                workspace_size=size,
                request_offset=size % 3,
            )
        yield subject_call(
            f"{batch}: by default", seq_lens_cpu=batch.metadata(HOST).seq_lens_cpu, workspace_size=longest
        )
    lens = torch.tensor([3, 9], dtype=torch.int32)
    yield subject_call("lengths 3 9: a workspace of 8", refused=True, seq_lens_cpu=lens, workspace_size=8)
    yield subject_call("no request", seq_lens_cpu=lens[:0], workspace_size=8)


@dataclass
class InputBatch:
    """A persistent batch with the fields that reordering reads: ids, computed tokens and prompt tokens."""

    req_ids: list[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    num_prompt_tokens: npt.NDArray[np.int32]

    @property
    def num_reqs(self) -> int:
        """The number of requests."""
        return len(self.req_ids)

    def swap_states(self, i1: int, i2: int) -> None:
        """Swap two requests."""
        for values in (self.req_ids, self.num_computed_tokens_cpu, self.num_prompt_tokens):
            values[i1], values[i2] = values[i2], values[i1]


def _reorder(target: Any, *, input_batch: InputBatch, scheduler_output: Any, **threshold: int) -> dict[str, Any]:
    """Return the result, and which requests are in front; the arguments contain the full order."""
    limit = threshold.get("decode_threshold", 1)
    moved = target(input_batch, scheduler_output, **threshold)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    short = sum(count <= limit for count in counts)
    return {"moved": moved, "front": sorted(input_batch.req_ids[:short]), "behind": sorted(input_batch.req_ids[short:])}


REGIONS = {
    "decode": (1, 9, 5),
    "first decode": (1, 9, 9),
    "decode of drafts": (2, 9, 5),
    "short extend": (1, 3, 8),
    "extend of two tokens": (2, 3, 8),
    "long extend": (6, 3, 20),
    "long past its prompt": (6, 20, 20),
    "first chunk": (6, 0, 10),
    "short first chunk": (1, 0, 10),
    "whole prompt of one token": (1, 0, 1),
}
"""Scheduled tokens, computed tokens and prompt tokens of one request for every region, at every threshold."""


def _mixtures() -> Iterator[tuple[str, ...]]:
    """Yield every order of one request from each region, and longer mixtures."""
    yield from permutations(("decode", "short extend", "long extend", "first chunk"))
    yield from permutations(("first decode", "short first chunk", "extend of two tokens", "long past its prompt"))
    kinds = tuple(REGIONS)
    for step in (1, 2, 4, 5, 7, 8):
        for count in (3, 5, 9, 16):
            yield tuple(kinds[(place * step + place // len(kinds) + count) % len(kinds)] for place in range(count))


def _orders(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def calls(text: str, counts: Numbers, computed: Numbers, prompts: Numbers, *tags: str) -> Iterator[SubjectCall]:
        names = [f"r{number}" for number in range(len(counts))]
        scheduled = dict(zip(names, counts, strict=True)) | {"another": 7}
        arguments: dict[str, Any] = {
            "input_batch": InputBatch(names, np.array(computed, np.int32), np.array(prompts, np.int32)),
            "scheduler_output": SimpleNamespace(num_scheduled_tokens=scheduled),
        }
        yield subject_call(f"{text}: by default", *tags, **arguments)
        for threshold in THRESHOLDS:
            yield subject_call(f"{text}: threshold {threshold}", *tags, **arguments, decode_threshold=threshold)

    for batch in setting.batches:
        computed, prompts = (9,) * batch.num_reqs, (5,) * batch.num_reqs
        yield from calls(f"{batch}, all past their prompts", batch.query_lens, computed, prompts)
        computed = tuple(s - q for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))
        yield from calls(
            f"{batch}, all in their prompts", batch.query_lens, computed, tuple(s + 1 for s in batch.seq_lens)
        )
    yield from calls("counts 5 1 7 1 1, all past their prompts", (5, 1, 7, 1, 1), (9,) * 5, (5,) * 5)
    for mixture in _mixtures():
        counts, computed, prompts = zip(*(REGIONS[kind] for kind in mixture), strict=True)
        yield from calls(", ".join(mixture), counts, computed, prompts)
    yield from calls("no request at all", (), (), ())
    yield subject_call(
        "a request that was not scheduled",
        refused=True,
        input_batch=InputBatch(["r0", "r1"], np.array([9, 9], np.int32), np.array([5, 5], np.int32)),
        scheduler_output=SimpleNamespace(num_scheduled_tokens={"r0": 3}),
    )


SUBJECTS = (
    Subject(
        "split_decodes_and_prefills",
        _boundaries,
        newer=frozenset({"treat_short_extends_as_decodes"}),
        ours=split_finished_prompts,
    ),
    Subject("split_decodes_prefills_and_extends", _three_parts),
    Subject("split_prefill_chunks", _workspaces),
    Subject("reorder_batch_to_split_decodes_and_prefills", _orders, _reorder),
)
