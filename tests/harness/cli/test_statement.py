"""``attncheck report --format statement`` and ``--verify``: what conforms, what is refused, what is made again.

The records are hand-made, one for each check of a profile, since a kernel of 789 checks takes minutes.
"""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_suite
from attncheck.cases.profile import load_profile, profile_names
from attncheck.harness.run import statement as statements
from attncheck.harness.run.statement import must_pass, profile_info
from attncheck.reports.run_file.header import BackendInfo, DeclaredClaim, SuiteInfo

DECODER, GRAPHS = "vllm-0.32-decoder", "vllm-0.32-decoder-graphs"
WAIVER = """\
- backend: Mine
  case: smoke/extend
  check: numerics
  outcome: failed
  reason: the last row is wrong
  issue: https://example.org/issues/17
"""
FAILED = {("smoke/extend", "numerics"): ("failed", {"summary": "1 of 16 rows is wrong", "figures": {}})}


def graph(declared, measured):
    return {"graph": {"declared": declared, "measured": measured, "recorder": "emulated"}}


@pytest.fixture
def write(folder, header, make_record, write_run):
    """``write({(case, check): (outcome, fields)})``: ``run.jsonl``, where all other checks of the profile passed."""

    def write(others=None, *, profile=DECODER, ref="smoke", level="ALWAYS", only=None, claims=()):
        (folder / "run.jsonl").unlink(missing_ok=True)
        backend = BackendInfo(
            name="Mine",
            ref="./mine.py:Mine",
            version="2",
            features=("sliding_window",),
            conventions={"lse_base": "e"},
            claims=claims,
        )
        suites = (SuiteInfo(name="smoke", ref=ref, cases=101),)
        records = []
        for (key, check), entry in must_pass(load_profile(profile), {"smoke": ref}).items():
            outcome, fields = (others or {}).get((key, check), ("passed", {}))
            if outcome is None or not entry.case_hash or (only and (key, check) not in only):
                continue
            if check == "cudagraph" and outcome == "passed":
                fields = graph(level, level) | fields
            named = {"case_id": entry.case.id, "case_hash": entry.case_hash, "check": check}
            who = {"backend": "Mine", "backend_ref": "./mine.py:Mine", "backend_version": "2"}
            records.append(make_record(outcome, **(who | named | fields)))
        checks = tuple(dict.fromkeys(record.check for record in records))
        described = header.model_copy(update={"suites": suites, "checks": checks, "backends": (backend,)})
        return write_run(folder / "run.jsonl", described, *records)

    return write


@pytest.fixture
def state(write, typed, folder):
    """``state(others, "--expect FILE")``: writes ``run.jsonl`` and its ``statement.json``, and returns what happened."""

    def state(others=None, words="", *, profile=DECODER, **options):
        write(others, profile=profile, **options)
        return typed(f"report run.jsonl --format statement --profile {profile} --output statement.json {words}")

    return state


@pytest.fixture
def verify(typed):
    return lambda words="": typed(f"report --verify statement.json {words}")


def stated(folder):
    return json.loads((folder / "statement.json").read_text())


def change(folder, edit, *, digest=True):
    """Edit the statement; with ``digest``, give it the digest of the new contents, as a forger would."""
    found = stated(folder)
    edit(found)
    (folder / "statement.json").write_text(json.dumps(found))
    if digest:
        own = statements.read_statement(folder / "statement.json").content_digest
        (folder / "statement.json").write_text(json.dumps(found | {"digest": own}))


def test_a_run_whose_checks_all_passed_conforms_and_is_verified_without_a_kernel(state, verify, folder):
    assert state().code == 0
    found = stated(folder)
    assert found["judgement"] == {
        "verdict": "conforms",
        "counts": {"passed": len(found["records"])},
        "missing": [],
        "waivers": [],
    }
    done = verify()
    assert done.code == 0
    assert re.sub(r"stated on \S+", "stated on DAY", done.out) == snapshot("""\
Mine 2: conforms to vllm-0.32-decoder version 1

stated on DAY from the run of 2026-01-01T00:00:00+00:00 on a cpu (cpu): torch 2.13.0+cpu,
  attncheck 0.1.0, seed 0

declared features: sliding_window

declared conventions: lse_base: e

789 checks in the must-pass list: 789 passed

checked:
  the file has the fields of a statement
  the digest is that of the contents
  each waiver was valid on the day of the statement
  profile and suites are those of the installed attncheck
  the verdict follows from the records

not checked:
  whether the records come from this backend: no digest shows it; --rerun N makes some checks again
""")


def test_a_statement_lists_the_claims_that_nothing_examines(state, verify):
    sinks = DeclaredClaim(member="supports_sink", value="yes", feature="sinks")
    rswa = DeclaredClaim(member="supports_rswa", value="yes", unexamined="no case has it")
    assert state(claims=(sinks, rswa)).code == 0
    done = verify()
    assert done.code == 0
    assert "declared, not examined:\n  supports_rswa: no case has it\n" in done.out
    assert "supports_sink" not in done.out


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (FAILED, "failed: 1 of 16 rows is wrong"),
        ({("smoke/extend", "numerics"): (None, {})}, "no record"),
        ({("smoke/extend", "numerics"): ("unsupported", {"reasons": ["rows of 16"]})}, "unsupported: rows of 16"),
        (
            {("smoke/extend", "numerics"): ("passed", {"case_hash": "0" * 12})},
            "the record is about another version of the case",
        ),
        ({("smoke/sinks", "numerics"): ("unavailable", {"reasons": ["no GPU"]})}, "unavailable: no GPU"),
        (
            {("smoke/alibi", "lse"): ("crashed", {"stage": "", "cause": "killed by SIGSEGV"})},
            "crashed: killed by SIGSEGV",
        ),
    ],
)
def test_a_check_that_does_not_hold_is_missing(state, verify, folder, others, reason):
    assert state(others).code == 1
    judgement = stated(folder)["judgement"]
    ((case, check),) = others
    assert judgement["verdict"] == "does not conform"
    assert judgement["missing"] == [{"case": case, "check": check, "reason": reason}]
    done = verify()
    assert done.code == 1
    assert "Mine 2: does not conform to vllm-0.32-decoder version 1" in done.out
    assert "does not hold" not in done.out


def test_what_a_backend_declares_as_unsupported_is_counted_apart(state, verify, folder):
    declared = {("smoke/sinks", "numerics"): ("unsupported", {"reasons": ["no sinks"]})}
    unexamined = {("smoke/sinks", "lse"): ("unsupported", {"reasons": ["not by this version"], "by": "attncheck"})}
    assert state(declared | unexamined).code == 0
    assert "787 passed, 1 declared unsupported, 1 not examined" in verify().out


def test_a_waiver_needs_an_id_and_a_date(state, verify, folder):
    for keys in ("", "  id: W1\n", "  until: 2999-12-31\n", "  id: W1\n  until: 2020-12-31\n"):
        (folder / "known.yaml").write_text(WAIVER + keys)
        assert state(FAILED, "--expect known.yaml").code == 1
    (folder / "known.yaml").write_text(WAIVER + "  id: W1\n  until: 2999-12-31\n")
    assert state(FAILED, "--expect known.yaml").code == 0
    assert stated(folder)["judgement"]["verdict"] == "conforms with waivers"
    done = verify()
    assert done.code == 0
    assert "Mine 2: conforms to vllm-0.32-decoder version 1 with waivers" in done.out
    assert "W1 until 2999-12-31: smoke/extend, numerics: the last row is wrong (https://example.org/issues/17)" in (
        " ".join(done.out.split())
    )


def test_an_expected_failure_of_the_run_is_waived_by_the_same_entry(state, folder):
    (folder / "known.yaml").write_text(WAIVER + "  id: W1\n  until: 2999-12-31\n")
    reason = "the last row is wrong (https://example.org/issues/17)"
    known = ("xfailed", {"underlying": "failed", "summary": "1 row is wrong", "reason": reason})
    assert state({("smoke/extend", "numerics"): known}, "--expect known.yaml").code == 0
    assert state({("smoke/extend", "numerics"): known}).code == 1


def test_a_changed_statement_is_refused(state, verify, folder):
    (folder / "known.yaml").write_text(WAIVER + "  id: W1\n  until: 2999-12-31\n")

    state(FAILED, "--expect known.yaml")
    original = (folder / "statement.json").read_text()

    def refused(edit, *, digest):
        (folder / "statement.json").write_text(original)
        change(folder, edit, digest=digest)
        done = verify()
        assert done.code == 1
        assert "the statement on vllm-0.32-decoder version 1 does not hold" in " ".join(done.out.split())
        return " ".join(done.out.split())

    def other_record(found):
        index = next(i for i, each in enumerate(found["records"]) if each["check"] == "cache_write")
        record = found["records"][index]
        kept = {name: record[name] for name in record if name not in ("outcome", "figures", "notes")}
        found["records"][index] = kept | {"outcome": "failed", "summary": "a slot is wrong", "figures": {}}

    def other_date(found):
        found["judgement"]["waivers"][0]["until"] = "2020-01-01"

    assert "the digest is" in refused(other_record, digest=False)
    assert "the digest is 000000000000..." in refused(lambda found: found.update(digest="0" * 64), digest=False)
    assert "records show 'does not conform'; smoke/decode.bfloat16, cache_write: failed: a slot is wrong" in (
        refused(other_record, digest=True)
    )
    assert "waiver W1 expired on 2020-01-01, before" in refused(other_date, digest=True)
    assert "records show 'conforms with waivers'" in refused(
        lambda found: found["judgement"].update(verdict="conforms"), digest=True
    )
    assert "installed attncheck has version 1, digest" in refused(
        lambda found: found["profile"].update(digest="0" * 64), digest=True
    )
    assert "the suites differ" in refused(lambda found: found["suites"][0].update(digest="0" * 12), digest=True)


def test_a_waiver_that_expires_after_the_statement_gives_a_note(state, verify, folder):
    (folder / "known.yaml").write_text(WAIVER + "  id: W1\n  until: 2999-12-31\n")
    state(FAILED, "--expect known.yaml")

    def older(found):
        found["day"] = "2020-01-01"
        found["judgement"]["waivers"][0]["until"] = "2020-06-30"

    change(folder, older)
    done = verify()
    assert done.code == 0
    assert "notes:\n  waiver W1 expired on 2020-06-30, before " in done.out


def test_a_graph_level_must_be_declared_and_measured(state, folder):
    assert state(profile=GRAPHS).code == 0
    assert state(profile=GRAPHS, level="UNIFORM_BATCH").code == 1
    missing = stated(folder)["judgement"]["missing"]
    assert {each["check"] for each in missing} == {"cudagraph"}
    reason = "graph level ALWAYS is needed; declared is UNIFORM_BATCH, measured UNIFORM_BATCH"
    assert {each["reason"] for each in missing} == {reason}
    for found, reason in {
        ("ALWAYS", None): "graph level ALWAYS is needed; declared is ALWAYS, measured none",
        ("UNIFORM_BATCH", "ALWAYS"): "graph level ALWAYS is needed; declared is UNIFORM_BATCH, measured ALWAYS",
    }.items():
        assert state({("smoke/extend", "cudagraph"): ("passed", graph(*found))}, profile=GRAPHS).code == 1
        assert stated(folder)["judgement"]["missing"][0]["reason"] == reason


def test_pages_may_be_those_of_the_backend_and_nothing_else(state, verify, folder):
    assert state(ref="smoke{cache.block_size: 64, cache.layout: HND}").code == 0
    assert verify().code == 0
    assert stated(folder)["judgement"]["counts"] == {"passed": 767, "not examined": 22}  # prefixes of 32 tokens
    done = state(ref="smoke{cache.block_size: 64, layer.head_size: 128}")
    assert (done.code, "only cache.block_size and cache.layout may be replaced" in done.err) == (2, True)


def test_a_badge_and_a_page_are_made_of_a_verified_statement(state, verify, folder):
    state()
    badge = ET.fromstring(verify("--format badge").out)
    assert badge.get("aria-label") == "attncheck on a cpu: conforms to vllm-0.32-decoder version 1"
    assert verify("--format markdown").out.startswith("# Mine 2: conforms to vllm-0.32-decoder version 1\n")
    change(folder, lambda found: found.update(seed=1), digest=False)
    done = verify("--format badge")
    assert done.code == 1
    assert "does not hold" in ET.fromstring(done.out).get("aria-label")


def test_a_sample_is_examined_again(state, verify, folder, preloaded):
    (folder / "mine.py").write_text(
        "from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl\n"
        "class Mine(ReferenceBackend):\n"
        "    class Impl(ReferenceImpl):\n"
        "        def forward(self, *args, **kwargs):\n"
        "            return super().forward(*args, **kwargs).mul_(FACTOR)\n"
        "    @classmethod\n"
        "    def get_name(cls): return 'MINE'\n"
        "    @classmethod\n"
        "    def get_impl_cls(cls): return cls.Impl\n"
        "FACTOR = 1.0\n"
    )
    two = {("smoke/decode.float32", "numerics"), ("smoke/prefill", "numerics")}
    state(only=two)
    done = verify("--rerun 9")
    assert done.code == 2  # it is code that the author of the statement chose
    assert "--rerun would run; to allow it, add --backend ./mine.py:Mine" in done.err
    done = verify("--rerun 9 --backend ./mine.py:Mine")
    assert "made again:\n  smoke/decode.float32, numerics: passed\n  smoke/prefill, numerics: passed\n" in done.out
    assert "not checked" not in done.out
    (folder / "mine.py").write_text((folder / "mine.py").read_text().replace("1.0", "1.25"))
    done = verify("--rerun 9 --backend ./mine.py:Mine")
    assert done.code == 1
    assert "smoke/prefill, numerics: stated is passed, and here it is failed" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "report run.jsonl --format statement",
            "--format statement needs --profile NAME; see `attncheck list profiles`",
        ),
        ("report run.jsonl --format badge", "--format badge is drawn from a statement; give --verify FILE"),
        ("report run.jsonl --profile vllm-0.32-decoder", "--profile and --expect belong to --format statement"),
        ("report run.jsonl --verify statement.json", "--verify reads the statement alone; leave out RUN, --runs"),
        ("report run.jsonl --rerun 2", "--rerun repeats checks of a statement; give --verify FILE"),
        ("report --verify statement.json --format html", "--verify cannot be combined with --format html"),
        ("report --verify run.jsonl", "run.jsonl is no statement that this attncheck reads"),
        ("report run.jsonl --format statement --profile nvidia", "nvidia"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(write, typed, words, message):
    write(only={("smoke/extend", "numerics")})
    done = typed(words)
    assert done.code == 2
    assert message in done.err


# A list that differs from that of the last release needs a new version, since statements name the version.
LISTS = {
    "vllm-0.32-decoder": snapshot((1, 789, "b270fe9fb736")),
    "vllm-0.32-decoder-graphs": snapshot((1, 789, "4d8924f84a13")),
    "vllm-0.32-encoder": snapshot((1, 189, "deb82e5b55a3")),
    "vllm-0.32-mla-decoder": snapshot((1, 490, "c680138ebff4")),
}


@pytest.mark.parametrize("name", LISTS)
def test_must_pass_lists_are_stable(name):
    assert profile_names() == list(LISTS)
    profile = load_profile(name)
    info = profile_info(profile, must_pass(profile, {}))
    assert profile.name == name
    assert (info.version, info.entries, info.digest[:12]) == LISTS[name]


def test_a_rule_selects_by_needs_and_the_first_one_decides():
    entries = must_pass(load_profile(DECODER), {})
    assert entries["smoke/decode.bfloat16", "numerics"].must == "pass"
    assert entries["smoke/decode.float16", "numerics"].must == "pass_if_declared"  # dtype
    assert entries["smoke/sinks", "numerics"].must == "pass_if_declared"  # a feature
    assert entries["smoke/decode.bfloat16", "lse"].must == "pass_if_declared"  # not among the checks of the first rule
    assert ("smoke/encoder-only", "numerics") not in entries
    required = [key for key, entry in entries.items() if entry.must == "pass"]
    assert (len({case for case, _ in required}), len({check for _, check in required})) == (27, 7)  # as the page states
    assert ("smoke/long-rows", "builder") not in entries  # the case does not have this check
    assert {case for case, _ in entries} < {case.key for case in load_suite("smoke")}


def test_profiles_and_changes_of_the_contract_are_listed(typed):
    assert "vllm-0.32-mla-decoder" in typed("list profiles").out
    done = typed("list contract --from 0.31 --to 0.32")
    assert "AttentionMetadataBuilder.use_cascade_attention: removed" in done.out
    assert "0.32 to 0.33" not in done.out
    assert "vLLM 0.32 to 0.33" in typed("list contract --from 0.31 --to 0.33").out
    assert "versions are 0.31, 0.32, 0.33" in typed("list contract --from 0.33 --to 0.32").err
    assert typed("list contract --from 0.2 --to 0.32").code == 2


def test_the_schema_of_a_statement_names_its_fields(state, typed, folder):
    state()
    described = json.loads(typed("list schema --of statement").out)
    assert {*described["properties"]} == {*stated(folder)}
