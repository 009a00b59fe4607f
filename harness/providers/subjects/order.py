"""Questions about the order of a batch: where decodes end, and what moves to the front."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from attncheck.harness.providers.batches import ProviderBatch
from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call

THRESHOLDS = (1, 2, 4)

Numbers = tuple[int, ...]


def _boundaries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def ask(
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
            yield ask(batch, threshold)
            yield ask(batch, threshold, uniform=True)
        yield ask(batch, 1, spare=3)
        yield subject_call(f"{batch}: by default", common_attn_metadata=batch.metadata(setting.device))
    yield ask(setting.batches[0], -1, "malformed", refused=True)


@dataclass
class InputBatch:
    """A persistent batch with what reordering reads: ids, tokens computed and of the prompt, in the batch's order."""

    req_ids: list[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    num_prompt_tokens: npt.NDArray[np.int32]

    @property
    def num_reqs(self) -> int:
        """How many requests there are."""
        return len(self.req_ids)

    def swap_states(self, i1: int, i2: int) -> None:
        """Swaps two places of everything."""
        for values in (self.req_ids, self.num_computed_tokens_cpu, self.num_prompt_tokens):
            values[i1], values[i2] = values[i2], values[i1]


def _reorder(target: Any, *, input_batch: InputBatch, scheduler_output: Any, **threshold: int) -> dict[str, Any]:
    """What it returned, and who stands in front; the full order is among the arguments."""
    limit = threshold.get("decode_threshold", 1)
    moved = target(input_batch, scheduler_output, **threshold)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    short = sum(count <= limit for count in counts)
    return {"moved": moved, "front": sorted(input_batch.req_ids[:short]), "behind": sorted(input_batch.req_ids[short:])}


def _orders(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def ask(text: str, counts: Numbers, computed: Numbers, prompts: Numbers, *tags: str) -> Iterator[SubjectCall]:
        names = [f"r{number}" for number in range(len(counts))]
        scheduled = dict(zip(names, counts, strict=True)) | {"another": 7}
        asked: dict[str, Any] = {
            "input_batch": InputBatch(names, np.array(computed, np.int32), np.array(prompts, np.int32)),
            "scheduler_output": SimpleNamespace(num_scheduled_tokens=scheduled),
        }
        yield subject_call(f"{text}: by default", *tags, **asked)
        for threshold in THRESHOLDS:
            yield subject_call(f"{text}: threshold {threshold}", *tags, **asked, decode_threshold=threshold)

    for batch in setting.batches:
        computed, prompts = (9,) * batch.num_reqs, (5,) * batch.num_reqs
        yield from ask(f"{batch}, all past their prompts", batch.query_lens, computed, prompts)
    yield from ask("counts 5 1 7 1 1, all past their prompts", (5, 1, 7, 1, 1), (9,) * 5, (5,) * 5)
    yield from ask("a first chunk of one token", (1, 1, 6), (0, 5, 3), (1, 5, 10), "first chunks")
    yield from ask("no request at all", (), (), ())
    yield subject_call(
        "a request that was not scheduled",
        refused=True,
        input_batch=InputBatch(["r0", "r1"], np.array([9, 9], np.int32), np.array([5, 5], np.int32)),
        scheduler_output=SimpleNamespace(num_scheduled_tokens={"r0": 3}),
    )


SUBJECTS = (
    Subject("split_decodes_and_prefills", _boundaries),
    Subject("reorder_batch_to_split_decodes_and_prefills", _orders, _reorder),
)
