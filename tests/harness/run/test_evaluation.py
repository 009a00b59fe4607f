"""The evaluation of cases: whatever a backend does becomes a record, of the right outcome."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.problem.memory_estimate import needed_bytes, shortage
from attncheck.harness.run import evaluation
from attncheck.harness.run.evaluation import Examiner, RunPlan, UnavailableBackend
from attncheck.harness.run.process_settings import THREAD_VARIABLES, current_device
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import OutputQuantSpec, PathSpec, SplitKVOptions
from attncheck.reports.run_file.records import Record


def loaded(backend: Any, name: str = "candidate") -> LoadedBackend:
    return LoadedBackend(name=name, ref=f"./x.py:{name}", backend=backend, version="", origin="test")


def variant(**members: Any) -> Any:
    return type("Variant", (ReferenceBackend,), members)


def with_impl(**members: Any) -> Any:
    impl = type("Impl", (ReferenceImpl,), members)
    return variant(get_impl_cls=staticmethod(lambda: impl))


def examine(backend: Any, *cases: Any, **plan: Any) -> dict[str, Record]:
    examiner = Examiner(RunPlan(cases=cases, backends=(loaded(backend),), **plan))
    records = list(examiner.run())
    assert examiner.blind == []
    return {record.check: record for record in records}


def outcomes(records: dict[str, Record]) -> dict[str, str]:
    return {check: record.outcome for check, record in records.items()}


ALL = ("numerics", "lse", "cache_write", "containment", "cudagraph", "refusals")


def test_an_honest_backend_passes_everything(make_case: Any) -> None:
    assert outcomes(examine(ReferenceBackend, make_case())) == dict.fromkeys(ALL, "passed")


@pytest.mark.parametrize("path", [PathSpec(), PathSpec(name="split_kv", options=SplitKVOptions())])
def test_a_backend_may_answer_in_a_tensor_of_its_own(make_case: Any, path: PathSpec) -> None:
    def forward(self: Any, *args: Any, output: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return cast(torch.Tensor, ReferenceImpl.forward(self, *args, output=output.clone(), **keywords))

    impl = type("Impl", (ReferenceImpl,), {"forward": forward})
    backend = variant(accept_output_buffer=False, get_impl_cls=staticmethod(lambda: impl))
    case = make_case((1, 70), (5, 40))
    records = examine(backend, replace(case, batch=replace(case.batch, path=path)))
    assert outcomes(records) == dict.fromkeys(ALL, "passed")


def test_an_exception_is_errored_and_breaks_the_claim(make_case: Any) -> None:
    records = examine(with_impl(attend=lambda *_: 1 / 0), make_case())
    assert outcomes(records) == dict.fromkeys(ALL[:5], "errored") | {"refusals": "failed"}
    record = records["numerics"]
    assert record.outcome == "errored"
    assert (record.stage, record.error_type, record.message) == ("forward", "ZeroDivisionError", "division by zero")


def test_leaving_the_process_is_errored_and_the_run_goes_on(make_case: Any) -> None:
    def leave(*_args: Any) -> None:
        raise SystemExit(0)

    assert outcomes(examine(with_impl(attend=leave), make_case()))["numerics"] == "errored"


def test_a_fault_of_attncheck_costs_one_check_and_is_called_its_own(
    make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any) -> None:
        raise IndexError("ours")

    monkeypatch.setattr("attncheck.harness.checks.lse.check_lse", broken)
    records = examine(ReferenceBackend, make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "passed") | {"lse": "errored"}
    record = records["lse"]
    assert record.outcome == "errored"
    assert (record.stage, record.message) == ("attncheck itself", "ours")


def test_an_errored_case_lets_go_of_its_cache(make_case: Any) -> None:
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


def test_long_messages_are_cut_and_odd_ones_can_be_stored(make_case: Any) -> None:
    def attend(*_args: Any) -> None:
        raise RuntimeError("\udcff" + "x" * 100_000)

    record = examine(with_impl(attend=attend), make_case())["numerics"]
    assert record.outcome == "errored"
    assert record.message.endswith("... (100006 characters)")
    assert len(record.model_dump_json()) < 30_000


def test_refusing_what_one_declares_is_errored_never_unsupported(make_case: Any) -> None:
    def refuse(*_args: Any, **_keywords: Any) -> None:
        raise NotImplementedError("windows are not for me")

    records = examine(with_impl(__init__=refuse), make_case(sliding_window=16))
    assert outcomes(records) == dict.fromkeys(ALL[:5], "errored") | {"refusals": "failed"}
    claim = records["refusals"]
    assert claim.outcome == "failed"
    assert claim.summary == "declared, but refused at construct: NotImplementedError: windows are not for me"


@pytest.mark.parametrize("name", ["unsupported_reasons", "unavailable_reasons", "unavailable_case_reasons"])
def test_a_declaration_that_raises_is_errored(make_case: Any, name: str) -> None:
    def broken(_cls: Any, *_args: Any) -> Any:
        raise KeyError(name)

    records = examine(variant(**{name: classmethod(broken)}), make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored")
    record = records["numerics"]
    assert record.outcome == "errored"
    assert record.stage == "declaration"


@pytest.mark.parametrize("name", ["unsupported_reasons", "unavailable_reasons", "unavailable_case_reasons"])
def test_a_text_is_no_list_of_reasons(make_case: Any, name: str) -> None:
    records = examine(variant(**{name: classmethod(lambda _cls, *_args: "no GPU")}), make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored")
    record = records["numerics"]
    assert record.outcome == "errored"
    assert "returned 'no GPU'" in record.message


def test_undeclared_and_refused_is_unsupported_and_an_honest_claim(make_case: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"sinks"})

    class Impl(ReferenceImpl):
        pass

    Impl.backend = backend
    backend.get_impl_cls = staticmethod(lambda: Impl)
    records = examine(backend, make_case(sinks=True))
    assert outcomes(records) == dict.fromkeys(ALL[:5], "unsupported") | {"refusals": "passed"}
    record = records["numerics"]
    assert record.outcome == "unsupported"
    assert "'sinks' is not declared" in record.reasons[0]


def test_undeclared_accepted_and_right_is_noted(make_case: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"sinks"})  # its impl still asks ReferenceBackend
    claim = examine(backend, make_case(sinks=True))["refusals"]
    assert claim.outcome == "passed"
    assert claim.notes[0].startswith("answered right without declaring it")


def test_undeclared_accepted_and_wrong_fails(make_case: Any) -> None:
    def without_sinks(self: Any, *args: Any, **keywords: Any) -> None:
        ReferenceImpl.__init__(self, *args, **(keywords | {"sinks": None}))

    backend = with_impl(__init__=without_sinks)
    backend.features = ReferenceBackend.features - {"sinks"}
    claim = examine(backend, make_case(sinks=True))["refusals"]
    assert claim.outcome == "failed"
    assert "accepted, and wrong" in claim.summary
    assert claim.meaning == "the sinks are ignored: its truth fits all rows"


def test_a_crash_instead_of_a_refusal_breaks_the_claim(make_case: Any) -> None:
    backend = with_impl(attend=lambda *_: 1 / 0)
    backend.features = ReferenceBackend.features - {"sinks"}
    claim = examine(backend, make_case(sinks=True))["refusals"]
    assert claim.outcome == "failed"
    assert claim.summary.startswith("not declared, and no clear refusal: ZeroDivisionError at forward after changing")


def test_undeclared_lse_is_unsupported(make_case: Any) -> None:
    backend = variant(features=ReferenceBackend.features - {"lse"})
    records = examine(backend, make_case())
    assert records["lse"].outcome == "unsupported"
    assert records["numerics"].outcome == "passed"


def test_other_machines_and_missing_libraries_are_unavailable(make_case: Any) -> None:
    assert set(outcomes(examine(variant(supported_devices=("cuda",)), make_case())).values()) == {"unavailable"}
    examiner = Examiner(
        RunPlan(cases=(make_case(),), backends=(UnavailableBackend("gone", "gone", ("no module named gone",)),))
    )
    assert {record.outcome for record in examiner.run()} == {"unavailable"}


def test_one_case_that_this_machine_gets_wrong_is_unavailable_and_no_other(make_case: Any) -> None:
    def gaps(device: str, layer: Any, cache: Any, batch: Any) -> list[str]:
        return [f"{layer.dtype} on {device}"] if layer.dtype == "bfloat16" else []

    backend = variant(unavailable_case_reasons=staticmethod(gaps))
    record = examine(backend, make_case(dtype="bfloat16"))["refusals"]
    assert record.outcome == "unavailable"
    assert record.reasons == ("bfloat16 on cpu",)
    assert examine(backend, make_case(dtype="float16"))["numerics"].outcome == "passed"


def test_what_this_version_cannot_ask_is_said_to_be_its_own_limit(make_case: Any) -> None:
    case = make_case((1, 70), output_quant=OutputQuantSpec(scale=0.02))
    split = PathSpec(name="split_kv", options=SplitKVOptions())
    record = examine(ReferenceBackend, replace(case, batch=replace(case.batch, path=split)))["refusals"]
    assert record.outcome == "unsupported"
    assert record.by == "attncheck"
    assert record.reasons == ("output_quant by the path 'split_kv': codes of parts of the keys cannot be merged",)


def test_a_blind_case_is_set_aside_and_the_run_goes_on(make_case: Any) -> None:
    blind, fine = make_case(name="blind", sliding_window=1000), make_case(name="fine")
    examiner = Examiner(
        RunPlan(cases=(blind, fine), backends=(loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")))
    )
    records = list(examiner.run())
    assert {record.case_id for record in records} == {"fine"}
    assert len(examiner.blind) == 1
    assert "made/blind: blind to sliding_window" in str(examiner.blind[0])
    assert examiner.fault_of(blind) is examiner.blind[0]
    assert examiner.fault_of(fine) is None
    assert examiner.blind[0].__traceback__ is None, "its frames would keep the case's tensors for the whole run"


def test_checks_are_those_of_plan_and_case_in_order(make_case: Any) -> None:
    from dataclasses import replace

    case = replace(make_case(), checks=("refusals", "numerics", "lse"))
    assert list(examine(ReferenceBackend, case, checks=("lse", "refusals", "cache_write"))) == ["lse", "refusals"]


def test_float32_stays_float32_and_the_callers_setting_comes_back(make_case: Any) -> None:
    seen = []

    def attend(self: Any, *args: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())
        ReferenceImpl.attend(self, *args)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        examine(with_impl(attend=attend), make_case(), checks=("numerics",))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_a_precision_set_per_backend_is_no_obstacle_and_comes_back(make_case: Any) -> None:
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


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "3"}, 3), ({"MKL_NUM_THREADS": "3"}, 3)]
)
def test_checks_but_timing_have_one_thread_unless_the_user_states_more(
    stated: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch, make_case: Any
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    seen: list[int] = []

    def attend(*args: Any) -> None:
        seen.append(torch.get_num_threads())
        ReferenceImpl.attend(*args)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        quick = TimingSettings(limit_s=60, min_samples=1, max_samples=1)
        backend = with_impl(attend=attend)
        assert outcomes(examine(backend, make_case((1, 20)), checks=("numerics",))) == {"numerics": "passed"}
        assert set(seen) == {expected}
        seen.clear()
        examine(backend, make_case((1, 20)), checks=("timing",), timing=quick)
        assert set(seen) == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_gpu_is_the_current_device_while_a_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert entered == ["cuda:1"]


def test_what_torch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch, make_case: Any) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2**34)
    assert shortage(make_case(), torch.device("cuda:0")) is None
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2**20)
    assert "cuda:0 has 0.0 GiB free" in str(shortage(make_case(), torch.device("cuda:0")))


def test_memory_is_looked_at_once_a_case(monkeypatch: pytest.MonkeyPatch, make_case: Any) -> None:
    asked = []
    monkeypatch.setattr(evaluation, "shortage", lambda case, _device: asked.append(case.id))
    cases = make_case(name="one"), make_case(name="two")
    backends = loaded(ReferenceBackend, "a"), loaded(ReferenceBackend, "b")
    assert {record.outcome for record in Examiner(RunPlan(cases=cases, backends=backends)).run()} == {"passed"}
    assert asked == ["one", "two"], "what the case itself holds must not count against the second backend"


def test_a_failing_case_is_dumped_as_plain_tensors(make_case: Any, tmp_path: Path) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args)
        args[6].mul_(1.5)

    records = examine(with_impl(attend=attend), make_case(), dump=tmp_path)
    assert records["numerics"].outcome == "failed"
    (path,) = tmp_path.iterdir()
    dump = torch.load(path, weights_only=True)
    assert dump["case"] == "made/case"
    error = (dump["output"].double() - dump["truth"]).norm(dim=-1)
    assert bool((error > dump["budget_norm"]).any())
    examine(ReferenceBackend, make_case(name="right"), dump=tmp_path)
    assert list(tmp_path.iterdir()) == [path], "what passes is not dumped"

    path.unlink()
    wrong = loaded(with_impl(attend=attend))
    first = next(Examiner(RunPlan(cases=(make_case(),), backends=(wrong,), dump=tmp_path)).run())
    assert first.outcome == "failed"
    assert list(tmp_path.iterdir()) == [path], "whoever stops at the first failure has its tensors"


def test_a_case_too_large_for_the_machine_is_unavailable_before_anything_is_allocated(make_case: Any) -> None:
    case = make_case((1, 2**20), cache={"num_blocks": 2**31})
    assert needed_bytes(case) > 2**40
    record = examine(ReferenceBackend, case)["numerics"]
    assert record.outcome == "unavailable"
    assert "GiB" in record.reasons[0]
    assert shortage(make_case(), torch.device("cpu")) is None


@pytest.mark.parametrize("answer", ["no", [1], None])
def test_a_declaration_that_gives_no_list_of_strings_is_errored(make_case: Any, answer: Any) -> None:
    records = examine(variant(unsupported_reasons=classmethod(lambda *_: answer)), make_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored")
    assert repr(answer) in records["numerics"].message  # type: ignore[union-attr]


def test_a_codec_that_cannot_read_back_errs_under_the_check_that_reads(make_case: Any) -> None:
    class Codec:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.steps_stored = 0

        def write(self, kv_cache: Any, slots: Any, key: Any, value: Any) -> None:
            self.steps_stored += len(slots) == 40
            if self.steps_stored == 2:  # stale rows stood there first; now cache_write makes its copy
                raise RuntimeError("not again")
            self._inner.write(kv_cache, slots, key, value)

        def read(self, kv_cache: Any, slots: Any) -> Any:
            return self._inner.read(kv_cache, slots)

    honest = ReferenceBackend.kv_cache_codec
    backend = variant(kv_cache_codec=staticmethod(lambda layer, cache: Codec(honest(layer, cache))))
    found = outcomes(examine(backend, make_case()))
    assert found["cache_write"] == "errored"
    assert found["numerics"] == "passed"


def test_a_truth_that_runs_out_of_memory_is_unavailable(make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("attncheck.harness.truth.truth_cache.truth_of", full)
    record = examine(ReferenceBackend, make_case())["numerics"]
    assert record.outcome == "unavailable"
    assert record.reasons == ("out of memory while the truth was computed: no more",)


def test_truths_are_computed_once_for_all_examiners(
    make_case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr("attncheck.harness.truth.truth_cache.truth_of", count)
    first = records()
    assert not (tmp_path / "truths").exists()
    assert records(stores_truths=True) == first
    assert computed == ["case", "case"]
    assert records() == first
    assert computed == ["case", "case"]
