"""What a backend declares about cases and machines decides the outcome, and must be true."""

from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.run.outcomes import not_loaded
from attncheck.reference.spec import DEFAULT_CHECKS, OutputQuantSpec
from attncheck.reference.step_spec import PathSpec, SplitKVOptions, StridesSpec

WITHOUT_SINKS = ReferenceBackend.features - {"sinks"}
NO_SINKS = "the layer has attention sinks: feature 'sinks' is not declared"


def outcomes(records):
    return {check: record.outcome for check, record in records.items()}


def test_refusing_what_one_declares_is_errored_never_unsupported(make_case, examine, with_impl):
    def refuse(*_args, **_keywords):
        raise NotImplementedError("windows are not for me")

    records = examine(with_impl(__init__=refuse), make_case(sliding_window=16))
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "errored") | {"refusals": "failed"}
    assert records["refusals"].summary == snapshot(
        "declared, but refused at construct: NotImplementedError: windows are not for me"
    )


@pytest.mark.parametrize("name", ["unsupported_reasons", "unavailable_reasons", "unavailable_case_reasons"])
@pytest.mark.parametrize("answer", [KeyError("no"), "no GPU", [1], None])
def test_a_declaration_that_raises_or_gives_no_list_of_strings_is_errored(make_case, name, answer, examine, variant):
    def declare(*_args):
        if isinstance(answer, Exception):
            raise answer
        return answer

    records = examine(variant(**{name: classmethod(declare)}), make_case())
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "errored")
    record = records["numerics"]
    assert record.stage == "declaration"
    assert record.message == "'no'" if isinstance(answer, Exception) else f"returned {answer!r}" in record.message


def test_undeclared_and_refused_is_unsupported_and_an_honest_claim(make_case, examine, variant):
    backend = variant(features=WITHOUT_SINKS)
    impl = type("Impl", (ReferenceImpl,), {"backend": backend})  # which refuses what its backend does not declare
    backend.get_impl_cls = staticmethod(lambda: impl)
    records = examine(backend, make_case(sinks=True))
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "unsupported") | {"refusals": "passed"}
    assert records["numerics"].reasons[0] == NO_SINKS


def ignoring_sinks(self, *args, **keywords):
    ReferenceImpl.__init__(self, *args, **(keywords | {"sinks": None}))


@pytest.mark.parametrize(
    ("impl", "outcome", "stated"),
    [
        pytest.param({}, "passed", f"answered right without declaring it: {NO_SINKS}", id="right"),
        pytest.param(
            {"__init__": ignoring_sinks},
            "failed",
            f"the backend does not declare the case ({NO_SINKS}), accepts it without an error, and its output is "
            "wrong: 40 of 40 rows are wrong, the first is row 0 (request 0, position 36), in all heads; the largest "
            "error is ...",
            id="wrong",
        ),
        pytest.param(
            {"attend": lambda *_: 1 / 0},
            "failed",
            "not declared, and no clear refusal: ZeroDivisionError at forward after changing the cache: division by zero",
            id="a crash instead of a refusal",
        ),
    ],
)
def test_undeclared_and_accepted_must_be_right(plain, make_case, examine, with_impl, impl, outcome, stated):
    backend = with_impl(**impl)
    backend.features = WITHOUT_SINKS
    claim = examine(backend, make_case(sinks=True), checks=("refusals",))["refusals"]
    assert claim.outcome == outcome
    assert plain(claim.notes[0] if outcome == "passed" else claim.summary) == stated
    if "output is wrong" in stated:
        assert claim.meaning.startswith("the sinks are ignored")


def test_undeclared_lse_is_unsupported(make_case, examine, variant):
    backend = variant(features=ReferenceBackend.features - {"lse"})
    found = outcomes(examine(backend, make_case(), checks=("numerics", "lse")))
    assert found == {"numerics": "passed", "lse": "unsupported"}


def test_other_machines_missing_libraries_and_cases_that_this_machine_gets_wrong_are_unavailable(
    make_case, examine, variant
):
    def gaps(device, layer, cache, batch):
        return [f"{layer.dtype} on {device}"] if layer.dtype == "bfloat16" else []

    assert set(outcomes(examine(variant(supported_devices=("cuda",)), make_case())).values()) == {"unavailable"}
    examiner = Examiner(RunPlan(cases=(make_case(),), backends=(not_loaded("gone", ("no module named gone",)),)))
    assert {record.outcome for record in examiner.run()} == {"unavailable"}
    backend = variant(unavailable_case_reasons=staticmethod(gaps))
    record = examine(backend, make_case(dtype="bfloat16"), checks=("numerics",))["numerics"]
    assert (record.outcome, record.reasons) == ("unavailable", ("bfloat16 on cpu",))
    assert examine(backend, make_case(dtype="float16"), checks=("numerics",))["numerics"].outcome == "passed"


def test_strides_that_a_convention_leaves_out_are_not_examined(make_case, examine, variant):
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
    ("declared", "taken"),
    [("undeclared", {"LB"}), ("pages", {"LB"}), ("blocks", {"LB", "BL"}), ("any", {"LB", "BL", "BHL", "LHB"})],
)
def test_a_case_whose_pages_lie_apart_runs_if_that_is_declared(make_case, examine, variant, declared, taken):
    backend = variant(conventions=Conventions(padded_rows="untouched", cache_strides=declared))
    for order in ("LB", "BL", "BHL", "LHB"):
        case = make_case(cache={"layout": "HND", "pool_order": order})
        records = examine(backend, case, checks=("numerics", "cache_write", "refusals"))
        assert set(outcomes(records).values()) == {"passed" if order in taken else "unsupported"}
        if order not in taken:
            assert f"pool_order {order}: cache_strides is {declared!r}" in records["numerics"].reasons
            tried = "; invariance tries such orders" if declared == "undeclared" else ""
            assert records["refusals"].reasons == (f"pool_order {order}: compared only where declared{tried}",)


def test_an_undeclared_order_hides_no_other_need(make_case, examine, variant):
    backend = variant(conventions=Conventions(cache_strides="pages"), features=frozenset())
    case = make_case(cache={"pool_order": "BL"}, sinks=True)
    order, sinks = examine(backend, case, checks=("refusals",))["refusals"].reasons
    assert order.startswith("pool_order BL")
    assert "feature 'sinks' is not declared" in sinks


def test_what_attncheck_cannot_examine_is_recorded_as_its_own_limit(make_case, examine):
    case = make_case((1, 70), output_quant=OutputQuantSpec(scale=0.02))
    split = PathSpec(name="split_kv", options=SplitKVOptions())
    record = examine(ReferenceBackend, replace(case, batch=replace(case.batch, path=split)))["refusals"]
    assert (record.outcome, record.by) == ("unsupported", "attncheck")
    assert record.reasons == ("output_quant by the path 'split_kv': codes of parts of the keys cannot be merged",)
    record = examine(ReferenceBackend, make_case((1, 9)), checks=("streams",))["streams"]
    assert (record.outcome, record.reasons, record.by) == ("unsupported", ("it needs a CUDA device",), "attncheck")
