"""attncheck's own command on the pretend device: its records are those of the CPU, and nothing is mixed on the way.

What differs, and why:

- the environment: its device, name and capability;
- the recorder of CUDA graphs, and the length of its reason why a capture fails: it ends at the first fault, and names
  the call as it is written; the emulation goes on, and names the function;
- the error of flex_attention, and its kernel: the compiled one gets half precision on CUDA, the eager one float32.
"""

import json
from collections import Counter

import pytest
from pretend_cuda import Settings

VALUES = ("numerics", "lse", "cache_write", "containment", "refusals")
GRAPHS = ("cudagraph",)
ONE_A_PATH = ("alibi", "fp8-cache", "cross", "verify-tree.*", "context-parallel", "micro-batches", "padded-mixed")
BACKENDS = ("reference", "torch_sdpa", "flex_attention")
KERNELS = ("triton_unified", "triton_mla")

RUNS = [
    (("reference",), "smoke", ONE_A_PATH, VALUES),
    (("torch_sdpa",), "smoke", ("padded-decode",), (*VALUES, *GRAPHS)),
    (("reference_mla", "torch_mla"), "smoke", ("latent-float32",), (*VALUES, *GRAPHS)),
]
MORE = [
    (("torch_sdpa", "flex_attention"), "smoke", ONE_A_PATH, VALUES),
    (("reference", "flex_attention"), "smoke", ONE_A_PATH, GRAPHS),
    (KERNELS, "interpreted", ("window-wide", "output-quant", "merge", "latent-short"), (*VALUES, *GRAPHS)),
]


def comparable(record):
    """What must be equal on both devices."""
    kept = record.model_dump(exclude={"environment", "duration_s"})
    if kept.get("graph"):
        del kept["graph"]["recorder"]
        for probe in kept["graph"]["probes"]:
            if "cannot be captured" in probe["reason"]:
                probe["reason"] = probe["reason"].partition(":")[0]
    if record.backend == "flex_attention" and record.outcome == "passed":
        kept["figures"].pop("budget_share", None)
        kept.pop("chosen_kernels")
    return kept


def by_name(record):
    return record.case_id, record.backend, record.check


@pytest.mark.parametrize(
    ("backends", "suite", "cases", "checks"), [*RUNS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_records_are_those_of_the_cpu(run_attncheck, tmp_path, backends, suite, cases, checks):
    if suite == "interpreted":
        pytest.importorskip("triton")
    words = [word for backend in backends for word in ("--backend", backend)]
    words += ["--suite", suite]
    words += [word for case in cases for word in ("--case", case)]
    words += [*(word for check in checks for word in ("--check", check)), "--in-process"]
    _, expected = run_attncheck(words)
    header, found = run_attncheck(words, Settings(report=str(tmp_path)))

    found, expected = sorted(found, key=by_name), sorted(expected, key=by_name)
    assert [comparable(record) for record in found] == [comparable(record) for record in expected]
    assert Counter(record.outcome for record in found)["passed"] >= len(cases)
    environment = header.environment
    assert (environment.device, environment.device_name) == ("cuda", "Pretend GPU")
    assert environment.capability == "9.0"
    recorders = {record.graph.recorder for record in found if getattr(record, "graph", None)}
    assert recorders <= {"cuda"}

    reports = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")]
    assert sum(sum(report["launches"].values()) for report in reports) > 100 * len(cases)
    assert not [act for report in reports for act in report["acts"] if act["kind"] in {"mixed", "float8"}]


@pytest.mark.slow
def test_metadata_utilities_are_examined_on_the_device(run_attncheck):
    words = ["--provider", "attncheck.reference", "--suite", "decode"]
    for function in ("get_dcp_local_seq_lens", "slice_query_start_locs", "compute_causal_conv1d_metadata", "v0.*"):
        words += ["--case", function]
    _, records = run_attncheck(words, Settings())
    assert {record.outcome for record in records} == {"passed"}
    assert len(records) > 10


def test_a_gpu_of_slow_float64_leaves_the_truth_to_the_host(run_attncheck, tmp_path):
    words = ["--backend", "reference", "--suite", "smoke", "--case", "long-chunk", "--check", "numerics"]
    slow = Settings(capability=(8, 6), num_sms=1, report=str(tmp_path))
    _, (found,) = run_attncheck(words, slow)
    assert found.outcome == "passed"
    assert found.notes == ("the float64 truth was computed on the CPU: by estimate, this GPU takes longer",)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")]
    assert not [act for report in reports for act in report["acts"] if act["kind"] == "mixed"]


def test_each_gpu_has_a_process_and_records_are_those_of_one(run_attncheck, tmp_path):
    """The second GPU begins the second backend, the third one, of another kind, nothing; no two processes share one."""
    words = ["--backend", "torch_sdpa", "--backend", "reference", "--suite", "smoke", "--check", "numerics,lse"]
    words += ["--case", "alibi", "--case", "padded-decode"]
    settings = Settings(
        names=("Pretend GPU", "Pretend GPU", "Another GPU"), lock=str(tmp_path / "lock"), report=str(tmp_path)
    )
    serial, expected = run_attncheck([*words, "--jobs", "1"], settings)
    assert used_gpus(tmp_path) == {0}
    header, found = run_attncheck([*words, "--jobs", "2"], settings)
    assert used_gpus(tmp_path) == {0, 1}
    timeless = {"duration_s"}
    assert [each.model_dump(exclude=timeless) for each in found] == [
        each.model_dump(exclude=timeless) for each in expected
    ]
    assert {record.outcome for record in found} == {"passed", "unsupported"}
    assert (header.environment, header.notes) == (serial.environment, serial.notes)
    assert [note for note in header.notes if note.startswith("GPU 2 (Another GPU, compute capability 9.0, 80.0 GiB)")]


def used_gpus(folder):
    """Return the numbers of the GPUs that processes launched something on, and forget the reports of the processes."""
    used = set()
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        used |= {report["gpus"][0]} if report["launches"] else set()
        path.unlink()
    return used
