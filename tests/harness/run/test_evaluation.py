"""The evaluation of a case: each thing that a backend does becomes a record of the right outcome."""

import contextlib
import gc
import weakref
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot
from pydantic import ValidationError

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.errors import BackendUnavailableError
from attncheck.harness.checks.findings import Broken, Holds, Measurements, NotExamined, TimingSettings
from attncheck.harness.problem.sizes import needed_bytes, shortage
from attncheck.harness.run import evaluate
from attncheck.harness.run.evaluate import THREAD_VARIABLES, Examiner, RunPlan, current_device
from attncheck.harness.run.outcomes import Circumstances, record_of
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reference.step_spec import PathSpec, SplitKVOptions
from attncheck.reports.run_file import records
from attncheck.reports.run_file.bits import Bits
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Timing

PASSED = dict.fromkeys(DEFAULT_CHECKS, "passed")


def outcomes(records):
    return {check: record.outcome for check, record in records.items()}


def raising(error):
    def fail(*_args, **_options):
        raise error

    return fail


def test_an_honest_backend_passes_everything(make_case, examine):
    assert outcomes(examine(ReferenceBackend, make_case())) == PASSED


@pytest.mark.parametrize("path", [PathSpec(), PathSpec(name="split_kv", options=SplitKVOptions())])
def test_a_backend_may_answer_in_a_tensor_of_its_own(make_case, path, examine, with_impl):
    def forward(self, *args, output, **keywords):
        return ReferenceImpl.forward(self, *args, output=output.clone(), **keywords)

    backend = with_impl(forward=forward)
    backend.accept_output_buffer = False
    case = make_case((1, 70), (5, 40))
    assert outcomes(examine(backend, replace(case, batch=replace(case.batch, path=path)))) == PASSED


@pytest.mark.parametrize(
    ("error", "outcome", "claim", "stated"),
    [
        (ZeroDivisionError("by zero"), "errored", "failed", ("forward", "ZeroDivisionError", "by zero")),
        (SystemExit(0), "errored", "failed", ("forward", "SystemExit", "0")),
        (BackendUnavailableError("SOME", ["no library"]), "unavailable", "unavailable", ("no library",)),
    ],
)
def test_what_a_backend_raises_is_the_outcome_and_breaks_its_claim(
    error, outcome, claim, stated, make_case, examine, with_impl
):
    records = examine(with_impl(attend=raising(error)), make_case())
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, outcome) | {"refusals": claim}
    record = records["numerics"]
    assert stated == (record.reasons if outcome == "unavailable" else (record.stage, record.error_type, record.message))


def test_a_fault_of_attncheck_costs_one_check_and_is_called_its_own(make_case, monkeypatch, examine):
    monkeypatch.setattr("attncheck.harness.checks.numerics.check_lse", None)
    records = examine(ReferenceBackend, make_case())
    assert outcomes(records) == PASSED | {"lse": "errored"}
    record = records["lse"]
    assert (record.stage, record.message) == ("attncheck itself", "'NoneType' object is not callable")


def test_an_errored_case_lets_go_of_its_cache(make_case, examine, with_impl):
    kept = []

    def attend(self, *_args):
        kept.append(weakref.ref(self))  # the session holds it beside the cache
        raise RuntimeError("late")

    gc.disable()
    try:
        examine(with_impl(attend=attend), make_case(), checks=("numerics",))
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()


def test_long_messages_are_cut_and_odd_ones_can_be_stored(make_case, examine, with_impl):
    attend = raising(RuntimeError("\udcff" + "x" * 100_000))
    record = examine(with_impl(attend=attend), make_case(), checks=("numerics",))["numerics"]
    assert record.outcome == "errored"
    assert record.message.endswith("... (100006 characters)")
    assert len(record.model_dump_json()) < 30_000


def test_a_blind_case_is_set_aside_and_the_run_goes_on(make_case, loaded):
    blind, fine = make_case(name="blind", sliding_window=1000), make_case(name="fine")
    backends = loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")
    examiner = Examiner(RunPlan(cases=(blind, fine), backends=backends, checks=("numerics",)))
    assert [record.case_id for record in examiner.run()] == ["fine", "fine"]
    (fault,) = examiner.blind
    assert str(fault) == snapshot(
        "case made/blind: blind to sliding_window: no row of the batch has a key it could act on; lengthen a request"
    )
    assert (examiner.fault_of(blind), examiner.fault_of(fine)) == (fault, None)
    assert fault.__traceback__ is None, "its frames would keep the case's tensors for the whole run"


def test_checks_are_those_of_plan_and_case_in_order(make_case, examine):
    case = replace(make_case(), checks=("refusals", "numerics", "lse"))
    assert list(examine(ReferenceBackend, case, checks=("lse", "refusals", "cache_write"))) == ["lse", "refusals"]


def test_memory_is_looked_at_once_a_case(monkeypatch, make_case, loaded):
    case_ids = []
    monkeypatch.setattr(evaluate, "shortage", lambda case, _device: case_ids.append(case.id))
    cases = make_case(name="one"), make_case(name="two")
    backends = loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")
    list(Examiner(RunPlan(cases=cases, backends=backends, checks=("numerics",))).run())
    assert case_ids == ["one", "two"], "what the case itself holds must not count against the second backend"


def test_a_failing_case_is_dumped_as_plain_tensors(make_case, tmp_path, examine, with_impl, loaded):
    def attend(self, *args):
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


def test_a_case_too_large_for_the_machine_is_unavailable_before_anything_is_allocated(make_case, examine):
    case = make_case((1, 2**20), cache={"num_blocks": 2**31})
    assert needed_bytes(case) > 2**40
    record = examine(ReferenceBackend, case)["numerics"]
    assert record.outcome == "unavailable"
    assert "GiB" in record.reasons[0]
    assert shortage(make_case(), torch.device("cpu")) is None


def test_a_codec_that_cannot_read_back_errs_under_the_check_that_reads(make_case, examine, variant):
    class Codec:
        def __init__(self, inner):
            self.read, self._write = inner.read, inner.write
            self.steps_stored = 0

        def write(self, kv_cache, slots, key, value):
            self.steps_stored += len(slots) == 40
            if self.steps_stored == 2:  # stale rows were there first; now cache_write makes its copy
                raise RuntimeError("not again")
            self._write(kv_cache, slots, key, value)

    honest = ReferenceBackend.kv_cache_codec
    backend = variant(kv_cache_codec=staticmethod(lambda layer, cache: Codec(honest(layer, cache))))
    found = outcomes(examine(backend, make_case(), checks=("numerics", "cache_write")))
    assert found == {"numerics": "passed", "cache_write": "errored"}


NO_MORE = MemoryError("no more")
REFUSED = RuntimeError("can't allocate memory: no more")


@pytest.mark.parametrize(
    ("place", "error", "outcome", "reason"),
    [
        ("truth.truth.truth_of", NO_MORE, "unavailable", f"while the truth was computed: {NO_MORE}"),
        ("truth.truth.truth_of", REFUSED, "unavailable", f"while the truth was computed: {REFUSED}"),
        ("run.evaluate.finding_of", NO_MORE, "unsupported", f"during the check: {NO_MORE}"),
    ],
)
def test_memory_that_attncheck_lacks_fails_no_backend(place, error, outcome, reason, make_case, monkeypatch, examine):
    monkeypatch.setattr(f"attncheck.harness.{place}", raising(error))
    record = examine(ReferenceBackend, make_case(), checks=("numerics",))["numerics"]
    assert (record.outcome, record.reasons) == (outcome, (f"out of memory {reason}",))


def test_truths_are_computed_once_for_all_examiners(make_case, tmp_path, monkeypatch, loaded):
    computed = []

    def count(problem, *args, **options):
        computed.append(problem.case.id)
        return truth_of(problem, *args, **options)

    folder = tmp_path / "truths"
    backends = (loaded(ReferenceBackend),)
    plan = RunPlan(cases=(make_case(),), backends=backends, checks=("numerics",), truths=folder)

    def records(*, stores_truths=False):
        found = Examiner(plan, stores_truths=stores_truths).run()
        return [record.model_copy(update={"duration_s": 0.0}) for record in found]

    monkeypatch.setattr("attncheck.harness.truth.truth.truth_of", count)
    first = records()
    assert not folder.exists()
    assert records(stores_truths=True) == first
    assert computed == ["case", "case"]
    assert records() == first
    assert computed == ["case", "case"]


# What a finding measured is in its record, in the field of the same name.


LEVELS = GraphLevels(declared="ALWAYS", measured=None, recorder="cuda")
TIMING = Timing(latencies=())
BITS = Bits(rungs=(), digest="")
MEASURED = {"graph": LEVELS, "chosen_kernels": ("flash", "math"), "bits": BITS, "timing": TIMING}


def recorded(finding):
    circumstances = Circumstances(seed=0, environment="abcdefabcdef", attncheck_version="0.1.0")
    question = SimpleNamespace(suite="smoke", id="one", hash="0123456789ab")
    backend = SimpleNamespace(name="a", ref="a", version="", features=frozenset())
    return record_of(circumstances, question, backend, "cudagraph", finding, 0.5)


def test_every_measurement_has_a_field_in_records_of_what_was_examined():
    measured = {field.name for field in fields(Measurements)}
    for outcome in (records.Passed, records.Failed, records.XFailed, records.XPassed):
        assert measured <= outcome.model_fields.keys()
    for finding in (Holds(**MEASURED), Broken("no", **MEASURED)):
        record = recorded(finding)
        assert (records.graph_of(record), records.timing_of(record)) == (LEVELS, TIMING)
        assert records.chosen_kernels_of(record) == ("flash", "math")
        assert records.bits_of(record) == BITS


def test_what_was_not_examined_has_levels_and_no_times():
    assert records.graph_of(recorded(NotExamined(("no kernel",), graph=LEVELS))) == LEVELS
    with pytest.raises(ValidationError):
        recorded(NotExamined(("no kernel",), timing=TIMING))


# Settings of the process while a backend runs: float32 products, threads, the current device.


@pytest.fixture
def observing(with_impl):
    """``observing(read, seen)``: a backend that appends what ``read`` returns to ``seen`` in each call."""

    def observing(read, seen):
        def attend(self, *args):
            seen.append(read())
            ReferenceImpl.attend(self, *args)

        return with_impl(attend=attend)

    return observing


def test_float32_stays_float32_and_the_callers_setting_comes_back(make_case, examine, observing):
    seen = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        examine(observing(torch.get_float32_matmul_precision, seen), make_case(), checks=("numerics",))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_a_precision_set_per_backend_is_no_obstacle_and_comes_back(make_case, examine):
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert examine(ReferenceBackend, make_case(), checks=("numerics",))["numerics"].outcome == "passed"
        assert [product.fp32_precision for product in products] == ["tf32", "tf32"]
    finally:
        torch.set_float32_matmul_precision("highest")
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("variable", [None, *THREAD_VARIABLES])
def test_checks_but_timing_have_one_thread_unless_the_user_states_more(
    variable, monkeypatch, make_case, examine, observing
):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "3")
    seen = []
    backend, case = observing(torch.get_num_threads, seen), make_case((1, 20))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        examine(backend, case, checks=("numerics",))
        assert set(seen) == {1 if variable is None else 3}
        seen.clear()
        examine(backend, case, checks=("timing",), timing=TimingSettings(limit_s=60, min_samples=1, max_samples=1))
        assert set(seen) == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_gpu_is_the_current_device_while_a_backend_runs(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(which):
        entered.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert entered == ["cuda:1"]
