"""The evaluation of a case: each thing that a backend does becomes a record of the right outcome."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.errors import BackendUnavailableError
from attncheck.harness.problem.sizes import needed_bytes, shortage
from attncheck.harness.run import evaluate
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import DEFAULT_CHECKS, PathSpec, SplitKVOptions, StridesSpec
from attncheck.reports.run_file.records import Record


def outcomes(records: dict[str, Record]) -> dict[str, str]:
    return {check: record.outcome for check, record in records.items()}


ALL = DEFAULT_CHECKS


def test_an_honest_backend_passes_everything(make_case: Any, examine: Any) -> None:
    assert outcomes(examine(ReferenceBackend, make_case())) == dict.fromkeys(ALL, "passed")


@pytest.mark.parametrize("path", [PathSpec(), PathSpec(name="split_kv", options=SplitKVOptions())])
def test_a_backend_may_answer_in_a_tensor_of_its_own(
    make_case: Any, path: PathSpec, examine: Any, variant: Any
) -> None:
    def forward(self: Any, *args: Any, output: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return cast(torch.Tensor, ReferenceImpl.forward(self, *args, output=output.clone(), **keywords))

    impl = type("Impl", (ReferenceImpl,), {"forward": forward})
    backend = variant(accept_output_buffer=False, get_impl_cls=staticmethod(lambda: impl))
    case = make_case((1, 70), (5, 40))
    records = examine(backend, replace(case, batch=replace(case.batch, path=path)))
    assert outcomes(records) == dict.fromkeys(ALL, "passed")


def test_strides_that_a_convention_leaves_out_are_not_examined(make_case: Any, examine: Any, variant: Any) -> None:
    backend = variant(conventions=Conventions(padded_rows="untouched", operand_strides="rows"))
    plain = replace(make_case(), strides=StridesSpec(query="padded", key="contiguous", output="offset"))
    assert examine(backend, plain, checks=("numerics",))["numerics"].outcome == "passed"
    for name, own in {"strides.key transposed": {"key": "transposed"}, "output": {"output": "padded"}}.items():
        case = replace(make_case(), strides=StridesSpec(**own))
        records = examine(backend, case)
        assert set(outcomes(records).values()) == {"unsupported"}
        assert name in records["numerics"].reasons[0]
        assert examine(ReferenceBackend, case, checks=("numerics",))["numerics"].outcome == "passed"


@pytest.mark.parametrize(
    ("error", "outcome", "claim", "told"),
    [
        (
            ZeroDivisionError("division by zero"),
            "errored",
            "failed",
            ("forward", "ZeroDivisionError", "division by zero"),
        ),
        (SystemExit(0), "errored", "failed", ("forward", "SystemExit", "0")),
        (
            BackendUnavailableError("SOME", ["it needs a library"]),
            "unavailable",
            "unavailable",
            ("it needs a library",),
        ),
    ],
)
def test_what_a_backend_raises_is_the_outcome_and_breaks_its_claim(
    error: BaseException, outcome: str, claim: str, told: tuple[str, ...], make_case: Any, examine: Any, with_impl: Any
) -> None:
    def attend(*_args: Any) -> None:
        raise error

    records = examine(with_impl(attend=attend), make_case())
    assert outcomes(records) == dict.fromkeys(ALL[:-1], outcome) | {"refusals": claim}
    record = records["numerics"]
    assert told == (record.reasons if outcome == "unavailable" else (record.stage, record.error_type, record.message))


def test_a_fault_of_attncheck_costs_one_check_and_is_called_its_own(
    make_case: Any, monkeypatch: pytest.MonkeyPatch, examine: Any
) -> None:
    monkeypatch.setattr("attncheck.harness.checks.numerics.check_lse", None)
    records = examine(ReferenceBackend, make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "passed") | {"lse": "errored"}
    record = records["lse"]
    assert record.outcome == "errored"
    assert (record.stage, record.message) == ("attncheck itself", "'NoneType' object is not callable")


def test_an_errored_case_lets_go_of_its_cache(make_case: Any, examine: Any, with_impl: Any) -> None:
    kept = []

    def attend(self: Any, *_args: Any) -> None:
        kept.append(weakref.ref(self))  # the session holds it beside the cache
        raise RuntimeError("late")

    gc.disable()
    try:
        examine(with_impl(attend=attend), make_case(), checks=("numerics",))
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()


def test_long_messages_are_cut_and_odd_ones_can_be_stored(make_case: Any, examine: Any, with_impl: Any) -> None:
    def attend(*_args: Any) -> None:
        raise RuntimeError("\udcff" + "x" * 100_000)

    record = examine(with_impl(attend=attend), make_case())["numerics"]
    assert record.outcome == "errored"
    assert record.message.endswith("... (100006 characters)")
    assert len(record.model_dump_json()) < 30_000


def test_a_blind_case_is_set_aside_and_the_run_goes_on(make_case: Any, loaded: Any) -> None:
    blind, fine = make_case(name="blind", sliding_window=1000), make_case(name="fine")
    examiner = Examiner(
        RunPlan(cases=(blind, fine), backends=(loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")))
    )
    records = list(examiner.run())
    assert {record.case_id for record in records} == {"fine"}
    assert len(examiner.blind) == 1
    assert str(examiner.blind[0]) == snapshot(
        "case made/blind: blind to sliding_window: no row of the batch has a key it could act on; lengthen a request"
    )
    assert examiner.fault_of(blind) is examiner.blind[0]
    assert examiner.fault_of(fine) is None
    assert examiner.blind[0].__traceback__ is None, "its frames would keep the case's tensors for the whole run"


def test_checks_are_those_of_plan_and_case_in_order(make_case: Any, examine: Any) -> None:
    case = replace(make_case(), checks=("refusals", "numerics", "lse"))
    assert list(examine(ReferenceBackend, case, checks=("lse", "refusals", "cache_write"))) == ["lse", "refusals"]


def test_memory_is_looked_at_once_a_case(monkeypatch: pytest.MonkeyPatch, make_case: Any, loaded: Any) -> None:
    case_ids = []
    monkeypatch.setattr(evaluate, "shortage", lambda case, _device: case_ids.append(case.id))
    cases = make_case(name="one"), make_case(name="two")
    backends = loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")
    list(Examiner(RunPlan(cases=cases, backends=backends, checks=("numerics",))).run())
    assert case_ids == ["one", "two"], "what the case itself holds must not count against the second backend"


def test_a_failing_case_is_dumped_as_plain_tensors(
    make_case: Any, tmp_path: Path, examine: Any, with_impl: Any, loaded: Any
) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args)
        args[6].mul_(1.5)

    examine(ReferenceBackend, make_case(name="right"), checks=("numerics",), dump=tmp_path)
    assert list(tmp_path.iterdir()) == [], "what passes is not dumped"
    plan = RunPlan(cases=(make_case((1, 9)),), backends=(loaded(with_impl(attend=attend)),), dump=tmp_path)
    assert next(Examiner(plan).run()).outcome == "failed"
    (path,) = tmp_path.iterdir()  # also of a run that stops at the first failure
    dump = torch.load(path, weights_only=True)
    assert dump["case"] == "made/case"
    error = (dump["output"].double() - dump["truth"]).norm(dim=-1)
    assert bool((error > dump["budget_norm"]).any())


def test_a_case_too_large_for_the_machine_is_unavailable_before_anything_is_allocated(
    make_case: Any, examine: Any
) -> None:
    case = make_case((1, 2**20), cache={"num_blocks": 2**31})
    assert needed_bytes(case) > 2**40
    record = examine(ReferenceBackend, case)["numerics"]
    assert record.outcome == "unavailable"
    assert "GiB" in record.reasons[0]
    assert shortage(make_case(), torch.device("cpu")) is None


def test_a_codec_that_cannot_read_back_errs_under_the_check_that_reads(
    make_case: Any, examine: Any, variant: Any
) -> None:
    class Codec:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.steps_stored = 0

        def write(self, kv_cache: Any, slots: Any, key: Any, value: Any) -> None:
            self.steps_stored += len(slots) == 40
            if self.steps_stored == 2:  # stale rows were there first; now cache_write makes its copy
                raise RuntimeError("not again")
            self._inner.write(kv_cache, slots, key, value)

        def read(self, kv_cache: Any, slots: Any) -> Any:
            return self._inner.read(kv_cache, slots)

    honest = ReferenceBackend.kv_cache_codec
    backend = variant(kv_cache_codec=staticmethod(lambda layer, cache: Codec(honest(layer, cache))))
    found = outcomes(examine(backend, make_case()))
    assert found["cache_write"] == "errored"
    assert found["numerics"] == "passed"


@pytest.mark.parametrize(
    ("place", "error", "outcome", "reason"),
    [
        ("truth.truth.truth_of", MemoryError("no more"), "unavailable", "while the truth was computed: no more"),
        (
            "truth.truth.truth_of",
            RuntimeError("can't allocate memory: no more"),
            "unavailable",
            "while the truth was computed: can't allocate memory: no more",
        ),
        ("run.evaluate.finding_of", MemoryError("no more"), "unsupported", "during the check: no more"),
    ],
)
def test_memory_that_attncheck_lacks_fails_no_backend(
    place: str, error: Exception, outcome: str, reason: str, make_case: Any, monkeypatch: Any, examine: Any
) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(f"attncheck.harness.{place}", full)
    record = examine(ReferenceBackend, make_case())["numerics"]
    assert (record.outcome, record.reasons) == (outcome, (f"out of memory {reason}",))


def test_truths_are_computed_once_for_all_examiners(
    make_case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Any
) -> None:
    computed: list[str] = []

    def count(problem: Any, *args: Any, **options: Any) -> Any:
        computed.append(problem.case.id)
        return truth_of(problem, *args, **options)

    def records(*, stores_truths: bool = False) -> list[Record]:
        plan = RunPlan(
            cases=(make_case(),),
            backends=(loaded(ReferenceBackend),),
            checks=("numerics",),
            truths=tmp_path / "truths",
        )
        found = Examiner(plan, stores_truths=stores_truths).run()
        return [record.model_copy(update={"duration_s": 0.0}) for record in found]

    monkeypatch.setattr("attncheck.harness.truth.truth.truth_of", count)
    first = records()
    assert not (tmp_path / "truths").exists()
    assert records(stores_truths=True) == first
    assert computed == ["case", "case"]
    assert records() == first
    assert computed == ["case", "case"]


def test_without_cuda_streams_are_not_examined(make_case: Any, examine: Any) -> None:
    found = examine(ReferenceBackend, make_case((1, 9)), checks=("streams",))["streams"]
    assert (found.outcome, found.reasons, found.by) == ("unsupported", ("it needs a CUDA device",), "attncheck")
