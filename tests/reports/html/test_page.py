"""The HTML report: one file that fetches nothing, has its sections in order, and is readable without a script."""

import base64
import hashlib
import re
import sys
from importlib import resources

import matplotlib as mpl
import pytest

from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.support import SupportRow
from attncheck.reports.document.support import SIGNS, support_blocks
from attncheck.reports.html import render_runs, text

LENGTHS = (512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def parse(parsed):
    """``parse(run, ...)``: the page of these runs, taken apart."""
    return lambda *runs: parsed(render_runs(runs))


OTHER = r"$\a_1$ <b>"


@pytest.fixture(scope="module")
def page(parse, timed, run_with, record_of):
    """The page of a fast backend that failed in one case, and of a slower one of an odd name."""
    failed = record_of("failed", case_id="bad", backend="one", summary="3 of 8 rows", needs=("lse",))
    return parse(run_with([*timed(["one", OTHER], LENGTHS, rounds=2), failed]))


def test_sections_come_in_the_order_of_a_reader(page):
    assert page.texts["h2"] == [
        *("Verdicts", "Findings", "Checks", "Features", "Sizes and forms", "Speeds"),
        *("Not examined", "Circumstances", "Records"),
    ]
    assert "failed 2 backends (1 failed, 1 passed), 9 cases (the worst of 2 rounds counts)" in page.shown
    for shown in ("a gpu, compute capability 9.0, driver 580.1", "3 of 8 rows", "feature 'lse' is not declared"):
        assert shown in page.shown
    command = "attncheck run --backend one --suite decode --case bad --check numerics --device cuda"
    assert any(code.startswith(command) for code in page.texts["code"])
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"].removeprefix("#") for link in page.all("a")} <= set(ids)


def test_the_page_is_well_formed_and_fetches_nothing(page):
    assert page.faults == []
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "action"} & set(attributes)
        assert all(value.startswith("#") for name, value in attributes.items() if name in ("href", "xlink:href"))
        assert not [name for name in attributes if name.startswith("on")]
    style = "".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [each["content"] for each in page.all("meta") if "content-security-policy" in str(each).lower()]
    digest = base64.b64encode(hashlib.sha256(page.texts["script"][1].encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"script-src 'sha256-{digest}'"]


def test_runs_are_compared_with_the_first_and_leave_matplotlib_as_it_was(parsed, timed, run_with):
    def settings():
        return {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}  # which is chosen when read

    base = run_with(timed(["one", "two"], LENGTHS[:2], rounds=6), path="base.jsonl")
    new = run_with(timed(["one", "two"], LENGTHS[:2], rounds=6, slower=1.3, seed=1), path="new.jsonl")
    before = settings()
    text = render_runs([base, new])
    assert render_runs([base, new]) == text
    assert settings() == before
    assert "matplotlib.pyplot" not in sys.modules
    page = parsed(text)
    assert page.faults == []
    assert page.texts["h2"][:2] == ["Comparison: new.jsonl with base.jsonl", "Verdict"]
    assert "regression" in page.texts["b"]
    chart = page.all("svg")[0]["aria-label"]
    assert chart.count(": slower ") == 4  # forward of each case of the first backend
    assert page.data["texts"].count("new.jsonl") == 1


def test_runs_of_one_file_name_have_distinct_names(parse, run_with, record_of):
    runs = [run_with([record_of()], path=f"{folder}/run.jsonl") for folder in ("a", "b", "b")]
    assert {"1: a/run.jsonl", "2: b/run.jsonl", "3: b/run.jsonl"} <= set(parse(*runs).texts["h2"])
    assert {"a/run.jsonl", "b/run.jsonl"} <= set(parse(*runs[:2]).texts["h2"])


def test_a_run_without_any_answer_or_without_its_end_is_a_page_too(parse, run_with, record_of):
    nothing = record_of("unavailable", reasons=("needs a GPU",))
    left_out = record_of("unsupported", check="lse", reasons=("no",), by="attncheck")
    page = parse(run_with([nothing, left_out]))
    assert page.faults == []
    assert "needs a GPU" in page.shown
    assert "unsupported by attncheck" in page.shown
    paragraphs = parse(run_with([], is_complete=False)).texts["p"]
    cut = next(place for place, text in enumerate(paragraphs) if "was cut off" in text)
    assert paragraphs.index("unfinished") < cut
    runs = [run_with([record_of(backend=name, case_id=name)], path=f"{name}.jsonl") for name in ("one", "other")]
    page = parse(*runs)
    assert "These runs cannot be compared" in page.shown
    assert page.texts["h2"].count("Verdicts") == 2


def test_a_known_fault_is_neither_green_nor_red(parse, run_with, record_of):
    known = record_of("xfailed", case_id="b", underlying="failed", summary="7 rows", reason="known")
    page = parse(run_with([record_of(case_id="a"), known]))
    cells = {attributes.get("class") for attributes in page.all("td")}
    assert "number t-warn" in cells
    assert not {"number t-good", "number t-bad"} & cells
    chips = [attributes["class"] for tag, attributes in page.elements if "chip" in str(attributes.get("class"))]
    assert set(chips) == {"chip t-warn"}


def test_measured_support_has_signs_and_words(run_with, record_of, parsed):
    names = ["one", *(f"other_{index}" for index in range(5))]
    header = run_with([record_of(backend=name) for name in names]).header
    rows = [
        SupportRow("one", "alibi", is_declared=True, right=3),
        SupportRow("one", "sinks", is_declared=True, right=1, short=2),
        SupportRow("one", "mla", is_declared=False, refused=4),
        SupportRow("one", "tree", is_declared=False, wrong=1, refused=2),
        SupportRow("one", "lse", is_declared=True, left=5),
    ]
    markup = text.render(support_blocks(header, names, rows))
    page = parsed(markup)
    signs = [each for each in page.elements if each[1].get("class", "").startswith("sign")]
    in_cells = [attributes["title"] for _, attributes in signs if "title" in attributes]
    assert in_cells == [
        "right (3)",
        "declared: not examined",
        "not declared: refused (4)",
        "wrong in 2 of 3",
        "not declared: refused (2); accepted, and the output is wrong (1)",
    ]
    assert [count for count in page.texts["span"] if count in ("3", "4", "2/3", "1")] == ["3", "4", "2/3", "1"]
    explained = [SIGNS[name].meaning for name in ("right", "declared", "refused", "short", "wrong")]
    assert [meaning for meaning in explained if f" {meaning}</span>" in markup] == explained
    assert 'class="matrix"' in markup


def luminance(colour):
    """Relative luminance, as WCAG 2 defines it."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [1, 2], ids=["light", "dark"])
def test_colours_can_be_read(theme):
    """4.5 to 1 for text and 3 to 1 for marks, as WCAG 2 requires (AA)."""
    style = (resources.files("attncheck.reports.html") / "templates" / "page.css").read_text(encoding="utf-8")
    named = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    shown = {found[0]: found[theme] for found in named}
    for ink in ("ink", "muted", "link", "good", "bad", "warn", "calm"):
        for ground in ("ground", "surface", "raised"):
            assert contrast(shown[ink], shown[ground]) >= 4.5, (ink, ground)
    for tone in ("good", "bad", "warn", "calm"):
        assert contrast(shown[tone], shown[f"{tone}-ground"]) >= 4.5, tone
    for index in range(12):
        assert contrast(shown[f"series-{index}"], shown["ground"]) >= 3, index


# ---- The data of the records ----


def rebuilt(data):
    """All records of a page as ``(backend, suite, case id, check, outcome, content, command)``."""
    texts = data["texts"]
    return [
        (
            *(texts[place] for place in (backend, suite)),
            case_id,
            *(texts[place] for place in (check, outcome)),
            data["contents"][content],
            "".join(texts[place] for place in command),
        )
        for _, backend, suite, case_id, _, _, records in data["groups"]
        for check, outcome, _, _, content, *command in records
    ]


def test_every_record_is_there_with_its_command(parse, run_with, record_of):
    run = run_with(
        [
            record_of(case_id="a", duration_s=0.25),
            record_of(case_id="a b --check c", check="lse"),
            record_of(case_id="a", backend="other"),
            record_of("unsupported", case_id="b", reasons=("no",)),
            record_of(check="utilities", case_id="f"),
        ]
    )
    data = parse(run).data
    expected = [(r.backend, r.suite, r.case_id, r.check, r.outcome, repro_command(r, run.header)) for r in run.records]
    assert sorted((*row[:5], row[6]) for row in rebuilt(data)) == sorted(expected)
    assert data["contents"] == [{}, {"": "no"}]
    assert data["groups"][0][-1][0][3] == 0.25


@pytest.mark.parametrize(
    ("outcome", "fields", "expected"),
    [
        (
            "failed",
            {"summary": "7 rows", "meaning": "off by one", "figures": {"budget_share": 18.4}},
            {"": "7 rows", "error / allowed": 18.4, "cause": "perhaps: off by one", "figures": {"budget_share": 18.4}},
        ),
        (
            "errored",
            {"stage": "forward", "error_type": "ValueError", "message": "no\nsuch", "traceback": "File 1"},
            {"": "ValueError in forward: no", "message": "no\nsuch", "traceback": "File 1"},
        ),
        (
            "crashed",
            {"stage": "check lse", "cause": "killed by SIGABRT", "output": "x"},
            {"": "killed by SIGABRT during check lse", "it printed": "x"},
        ),
        ("unsupported", {"reasons": ("a", "b"), "by": "attncheck"}, {"": "a; b", "left out": "by attncheck"}),
        (
            "xfailed",
            {"underlying": "failed", "summary": "7 rows", "reason": "known"},
            {"": "failed: 7 rows (expected: known)"},
        ),
    ],
)
def test_the_content_of_a_record_has_its_fields(parse, run_with, record_of, outcome, fields, expected):
    ((*_, content, _),) = rebuilt(parse(run_with([record_of(outcome, **fields)])).data)
    assert content.items() >= expected.items()


def test_times_of_a_record_are_in_units(parse, run_with, timed):
    first, *_ = timed(["one"], (4096,))
    ((*_, content, _),) = rebuilt(parse(run_with([first])).data)
    heads, forward, build = content["times"]
    latency = first.timing.latencies[0]
    assert (heads[1], forward[0], build[0]) == ("median", "forward", "build")
    assert forward[1] == f"{latency.median_ns / 1000:.1f} us"
    assert (
        forward[4] == f"{min(latency.samples_ns) / 1000:.1f} us to {max(latency.samples_ns) / 1000:.0f} us"
    )  # three digits
    assert content["device"] == "copy 4 TB/s, matmul of bfloat16 600 TFLOP/s"


# ---- Charts ----


def test_a_chart_has_a_row_for_each_case_and_a_marker_for_each_backend(page):
    (svg,) = page.all("svg")
    assert svg["aria-label"].count("decode.512: ") == 2
    for shown in (*(f"{kind}.{length}" for kind in ("decode", "prefill") for length in LENGTHS), OTHER):
        assert shown in page.texts["text"]
    styles = " ".join(str(attributes.get("style")) for _, attributes in page.elements)
    assert "#0a0b" not in styles
    assert "the least time that the device allows" in page.texts["figcaption"][0]
    marks = [attributes for attributes in page.all("use") if "--series-" in str(attributes.get("style"))]
    first, second = ([float(each["x"]) for each in marks if f"series-{n})" in each["style"]] for n in range(2))
    drawn = [(fast, slow) for fast, slow in zip(first, second, strict=True) if fast != slow]
    assert len(drawn) == 2 * len(LENGTHS) + 1  # decodes, prefills and the legend
    assert all(fast < slow for fast, slow in drawn)


def test_a_chart_has_at_most_its_rows_and_states_what_it_leaves_out(parse, run_with, timed):
    page = parse(run_with(timed(["\u6ce8\u610f \U0001f680"], range(512, 512 + 41 * 64, 64))))
    assert "; 42 more rows are in the table" in page.texts["figcaption"][0]
    assert "\u6ce8\u610f \U0001f680" in page.texts["text"]  # a name that the measuring font does not have
