"""The steps of the probes as problems with truths: made when they are asked for, once for all backends."""

from dataclasses import replace

import torch

from attncheck.cases.model import Case
from attncheck.cases.paths import implied_path
from attncheck.harness.checks.cudagraph.probes import Probe, ProbeStep, probes_of
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.truth_cache import TruthCache
from attncheck.reference.spec import BatchSpec, PaddingSpec, PathSpec, RequestSpec, SpecDecodeOptions


class ProbeProblems:
    """The probes of one layer and cache, which are ``case``'s; the batch is the probes' own.

    ``cache``: holds the truths; None: compute each.
    """

    def __init__(self, case: Case, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._case, self._seed = case, seed
        self._cache = cache or TruthCache(device)
        self.probes = probes_of(case.layer, case.cache)
        self._problems: dict[Case, Problem] = {}
        self._truths: dict[Case, Truth] = {}

    def case(self, probe: Probe, turn: ProbeStep, *, is_padded: bool = True) -> Case:
        """The question of one step; with ``is_padded``, as large as the graph it is for."""
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
        """The case as tensors."""
        if case not in self._problems:
            self._problems[case] = build_problem(case, self._seed)
        return self._problems[case]

    def truth(self, case: Case) -> Truth:
        """Its answer. A case too small to show a modifier is asked all the same: what counts here is the graph."""
        if case not in self._truths:
            self._truths[case] = self._cache.truth_of(self.problem(case), refuse_blindness=False)
        return self._truths[case]


def _num_blocks(probe: Probe, block_size: int) -> int:
    """One size for all steps of a probe: the cache of a model runner stays where it is."""
    return 4 + 2 * max(sum(-(-seq_len // block_size) for _, seq_len in turn.requests) for turn in probe.turns)
