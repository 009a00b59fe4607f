"""What a backend declares about cases and machines decides the outcome, and must be true."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.run.outcomes import not_loaded
from attncheck.reference.spec import DEFAULT_CHECKS, OutputQuantSpec, PathSpec, SplitKVOptions
from attncheck.reports.run_file.records import Record


def outcomes(records: dict[str, Record]) -> dict[str, str]:
    return {check: record.outcome for check, record in records.items()}


ALL = DEFAULT_CHECKS


def test_refusing_what_one_declares_is_errored_never_unsupported(make_case: Any, examine: Any, with_impl: Any) -> None:
    def refuse(*_args: Any, **_keywords: Any) -> None:
        raise NotImplementedError("windows are not for me")

    records = examine(with_impl(__init__=refuse), make_case(sliding_window=16))
    assert outcomes(records) == dict.fromkeys(ALL[:-1], "errored") | {"refusals": "failed"}
    claim = records["refusals"]
    assert claim.outcome == "failed"
    assert claim.summary == snapshot("declared, but refused at construct: NotImplementedError: windows are not for me")


@pytest.mark.parametrize("name", ["unsupported_reasons", "unavailable_reasons", "unavailable_case_reasons"])
@pytest.mark.parametrize("answer", [KeyError("no"), "no GPU", [1], None])
def test_a_declaration_that_raises_or_gives_no_list_of_strings_is_errored(
    make_case: Any, name: str, answer: Any, examine: Any, variant: Any
) -> None:
    def declare(*_args: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    records = examine(variant(**{name: classmethod(declare)}), make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored")
    record = records["numerics"]
    assert record.stage == "declaration"
    assert record.message == "'no'" if isinstance(answer, Exception) else f"returned {answer!r}" in record.message


def test_undeclared_and_refused_is_unsupported_and_an_honest_claim(make_case: Any, examine: Any, variant: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"sinks"})

    class Impl(ReferenceImpl):
        pass

    Impl.backend = backend
    backend.get_impl_cls = staticmethod(lambda: Impl)
    records = examine(backend, make_case(sinks=True))
    assert outcomes(records) == dict.fromkeys(ALL[:-1], "unsupported") | {"refusals": "passed"}
    assert records["numerics"].reasons[0] == "the layer has attention sinks: feature 'sinks' is not declared"


def test_undeclared_accepted_and_right_is_noted(make_case: Any, examine: Any, variant: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"sinks"})  # its impl still reads those of ReferenceBackend
    claim = examine(backend, make_case(sinks=True), checks=("refusals",))["refusals"]
    assert claim.outcome == "passed"
    assert claim.notes[0] == snapshot(
        "answered right without declaring it: the layer has attention sinks: feature 'sinks' is not declared"
    )


def test_undeclared_accepted_and_wrong_fails(
    plain: Callable[[str], str], make_case: Any, examine: Any, with_impl: Any
) -> None:
    def without_sinks(self: Any, *args: Any, **keywords: Any) -> None:
        ReferenceImpl.__init__(self, *args, **(keywords | {"sinks": None}))

    backend = with_impl(__init__=without_sinks)
    backend.features = ReferenceBackend.features - {"sinks"}
    claim = examine(backend, make_case(sinks=True), checks=("refusals",))["refusals"]
    assert claim.outcome == "failed"
    assert plain(claim.summary) == snapshot(
        "the backend does not declare the case (the layer has attention sinks: feature 'sinks' is not declared), accepts it without an error, and its output is wrong: 40 of 40 rows are wrong, the first is row 0 (request 0, position 36), in all heads; the largest error is ..."
    )
    assert plain(claim.meaning) == snapshot(
        "the sinks are ignored: a reference with this fault gives the same output in all rows"
    )


def test_a_crash_instead_of_a_refusal_breaks_the_claim(make_case: Any, examine: Any, with_impl: Any) -> None:
    backend = with_impl(attend=lambda *_: 1 / 0)
    backend.features = ReferenceBackend.features - {"sinks"}
    claim = examine(backend, make_case(sinks=True), checks=("refusals",))["refusals"]
    assert claim.outcome == "failed"
    assert claim.summary == snapshot(
        "not declared, and no clear refusal: ZeroDivisionError at forward after changing the cache: division by zero"
    )


def test_undeclared_lse_is_unsupported(make_case: Any, examine: Any, variant: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"lse"})
    found = outcomes(examine(backend, make_case(), checks=("numerics", "lse")))
    assert found == {"numerics": "passed", "lse": "unsupported"}


def test_other_machines_and_missing_libraries_are_unavailable(make_case: Any, examine: Any, variant: Any) -> None:
    assert set(outcomes(examine(variant(supported_devices=("cuda",)), make_case())).values()) == {"unavailable"}
    examiner = Examiner(RunPlan(cases=(make_case(),), backends=(not_loaded("gone", ("no module named gone",)),)))
    assert {record.outcome for record in examiner.run()} == {"unavailable"}


def test_one_case_that_this_machine_gets_wrong_is_unavailable_and_no_other(
    make_case: Any, examine: Any, variant: Any
) -> None:
    def gaps(device: str, layer: Any, cache: Any, batch: Any) -> list[str]:
        return [f"{layer.dtype} on {device}"] if layer.dtype == "bfloat16" else []

    backend = variant(unavailable_case_reasons=staticmethod(gaps))
    record = examine(backend, make_case(dtype="bfloat16"), checks=("numerics",))["numerics"]
    assert (record.outcome, record.reasons) == ("unavailable", ("bfloat16 on cpu",))
    assert examine(backend, make_case(dtype="float16"), checks=("numerics",))["numerics"].outcome == "passed"


def test_what_this_version_cannot_examine_is_recorded_as_its_own_limit(make_case: Any, examine: Any) -> None:
    case = make_case((1, 70), output_quant=OutputQuantSpec(scale=0.02))
    split = PathSpec(name="split_kv", options=SplitKVOptions())
    record = examine(ReferenceBackend, replace(case, batch=replace(case.batch, path=split)))["refusals"]
    assert record.outcome == "unsupported"
    assert record.by == "attncheck"
    assert record.reasons == snapshot(
        ("output_quant by the path 'split_kv': codes of parts of the keys cannot be merged",)
    )
