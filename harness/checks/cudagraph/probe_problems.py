"""Build the problem and truth of each probe step, on first use and once for all backends.

A step costs many small operations, so the steps of several probes are computed as one batch. Each step takes its rows
and keys from the batch and has its own pages.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch

from attncheck.cases.consistency import implied_path
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.probe import Probe, ProbeStep
from attncheck.harness.checks.cudagraph.probes import probes_of
from attncheck.harness.problem.page_layout import key_places, lay_out
from attncheck.harness.problem.problem import Problem, build_problem, place_requests
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.truth_cache import TruthCache
from attncheck.reference.spec import BatchSpec, PaddingSpec, PathSpec, RequestSpec, SpecDecodeOptions


class ProbeProblems:
    """The probes of one layer and cache, which are those of ``case``; each probe brings its own batch.

    ``cache``: stores truths. If None, each truth is computed. ``smallest``: the case with one request of one token.
    """

    def __init__(self, case: Case, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._case, self._seed = case, seed
        self._cache = cache or TruthCache(device)
        self.probes = probes_of(case.layer, case.cache)
        one_token = BatchSpec(requests=(RequestSpec(query_len=1),), path=implied_path(case.layer))
        self.smallest = replace(case, batch=one_token)
        self._cases: dict[tuple[Probe, ProbeStep, bool], Case] = {}
        self._problems: dict[Case, Problem] = {}
        self._truths: dict[Case, Truth] = {}
        self._batches: dict[Case, tuple[Case, int]] = {}

    def compute_together(self, probes: Iterable[Probe]) -> None:
        """Compute the steps of these probes as one batch, on first use of any of them."""
        steps = list(dict.fromkeys(self.case(probe, turn) for probe in probes for turn in probe.turns))
        steps = [step for step in steps if step not in self._problems and step not in self._batches]
        requests = tuple(chain.from_iterable(step.batch.requests for step in steps))
        if len(steps) < 2:
            return
        batch = replace(self._case, batch=BatchSpec(requests=requests, path=implied_path(self._case.layer)))
        first = 0
        for step in steps:
            self._batches[step] = batch, first
            first += step.batch.num_requests

    def case(self, probe: Probe, turn: ProbeStep, *, is_padded: bool = True) -> Case:
        """Return the case of one step. If ``is_padded``, it is padded to the size of its graph."""
        key = probe, turn, is_padded
        if key not in self._cases:
            self._cases[key] = self._case_of(probe, turn, is_padded=is_padded)
        return self._cases[key]

    def _case_of(self, probe: Probe, turn: ProbeStep, *, is_padded: bool) -> Case:
        requests = tuple(RequestSpec(query_len=query_len, seq_len=seq_len) for query_len, seq_len in turn.requests)
        padding = PaddingSpec()
        if turn.bucket is not None and is_padded:
            bucket, tokens = probe.buckets[turn.bucket], sum(request.query_len for request in requests)
            padding = PaddingSpec(requests=bucket.num_reqs - len(requests), tokens=bucket.num_tokens - tokens)
        path = implied_path(self._case.layer)
        if probe.drafts and turn.bucket is not None:
            path = PathSpec(name="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=probe.drafts))
        return replace(
            self._case,
            batch=BatchSpec(requests=requests, padding=padding, path=path),
            cache=replace(
                self._case.cache, num_blocks=_num_blocks(probe, self._case.cache.block_size), first_block=None
            ),
        )

    def problem(self, case: Case) -> Problem:
        """Return the case as tensors."""
        if case not in self._problems:
            batch = self._batches.get(case)
            self._problems[case] = (
                build_problem(case, self._seed) if batch is None else _part(self.problem(batch[0]), case, batch[1])
            )
        return self._problems[case]

    def truth(self, case: Case) -> Truth:
        """Return the truth of a case, even if the case is too small to show the effect of a modifier."""
        if case not in self._truths:
            batch = self._batches.get(case)
            self._truths[case] = (
                self._cache.truth_of(self.problem(case), refuse_blindness=False)
                if batch is None
                else self.truth(batch[0]).of_requests(batch[1], batch[1] + case.batch.num_requests)
            )
        return self._truths[case]


def _part(batch: Problem, case: Case, first: int) -> Problem:
    """Return the problem of ``case``: rows and keys of ``batch`` from request ``first`` on, in separate pages."""
    requests = tuple(place_requests(case))
    lengths = [request.num_keys for request in requests]
    row, key = batch.requests[first].first_row, batch.requests[first].base
    rows = slice(row, row + sum(request.rows for request in requests))
    keys = slice(key, key + sum(lengths))
    layout = lay_out(case, lengths, key_places(lengths), RandomStream(batch.seed, case.hash))()
    return replace(
        batch,
        case=case,
        requests=tuple(replace(each, pages=pages) for each, pages in zip(requests, layout.pages, strict=True)),
        query=batch.query[rows],
        keys=batch.keys[keys],
        values=batch.values[keys],
        layout=layout,
    )


def _num_blocks(probe: Probe, block_size: int) -> int:
    """Return one cache size for all steps of a probe, since a model runner does not reallocate its cache."""
    return 4 + 2 * max(sum(-(-seq_len // block_size) for _, seq_len in turn.requests) for turn in probe.turns)
