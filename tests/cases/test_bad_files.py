"""Malformed case files: each error states the place, the key, and what is allowed."""

import re
import time
from pathlib import Path

import pytest
import yaml
from inline_snapshot import snapshot

from attncheck.cases import yaml_tree
from attncheck.cases.loader import load_file, load_suite
from attncheck.errors import CaseFileError, QuestionError, SeveralMistakesError

HEAD = "suite: bad\ndefaults:\n  layer: {num_heads: 8, num_kv_heads: 2, head_size: 64}\ncases:\n"


def bad_files():
    """Return the files of ``bad_files.txt``, which describes itself, by their names."""
    found = {}
    for entry in Path(__file__).with_name("bad_files.txt").read_text().split("=== ")[1:]:
        name, _, text = entry.partition(" ")
        first, _, rest = text.partition("\n")
        if rest.startswith("    "):
            rest = f"  - id: a\n{rest}"
        if rest.startswith("  - "):
            rest = HEAD + rest
        found[name] = f"{first}\n{rest}".encode().replace(b"<NUL>", b"\0").replace(b"<E9>", b"\xe9")
    return found


FILES = bad_files()


@pytest.fixture
def write(tmp_path):
    """``write(name)``: the path of that bad file, and the line, column, key and phrase that its error must state."""

    def write(name):
        path = tmp_path / f"{name}.yaml"
        path.write_bytes(FILES[name])
        first = FILES[name].partition(b"\n")[0].decode()
        stated = re.fullmatch(r"# (\d+):(\d+) (\S*): (.+)", first)
        assert stated, f"{name} states no error in its first line"
        line, column, key, phrase = stated.groups()
        return path, int(line), int(column), key, phrase

    return write


def refusal_of(path):
    with pytest.raises(CaseFileError) as caught:
        load_file(path)
    return caught.value


@pytest.mark.parametrize("name", FILES)
def test_refusal(write, name):
    path, line, column, key, phrase = write(name)
    error = refusal_of(path)
    assert phrase in str(error)
    assert (error.line, error.column, error.key) == (line, column, key)
    assert str(error).startswith(f"{path}:{line}:{column}: ")
    assert error.allowed
    assert isinstance(error, QuestionError)
    assert len(str(error)) < len(str(path)) + 500
    assert "\n" not in str(error)


def test_without_libyaml_the_same_is_refused(write, monkeypatch):
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    for name in FILES:
        path, line, _, key, phrase = write(name)
        error = refusal_of(path)
        assert phrase in str(error), name
        assert (error.line, error.key) == (line, key), name


def test_refusing_takes_no_time(write):
    for name in ("alias_bomb", "matrix_too_large", "vllm_endless_range", "endless_number", "too_many_tokens_in_all"):
        path, *_ = write(name)
        start = time.perf_counter()
        refusal_of(path)
        assert time.perf_counter() - start < 2, name


LAYER = "{num_heads: 8, num_kv_heads: 2, head_size: 64}"


def several(tmp_path, text):
    """(line, key) of each mistake in ``text``."""
    path = tmp_path / "several.yaml"
    path.write_text(text)
    error = refusal_of(path)
    assert isinstance(error, SeveralMistakesError)
    assert str(error).count("\n") == min(len(error.errors), 11) - 1
    assert (error.line, error.key) == (error.errors[0].line, error.errors[0].key)
    return [(each.line, each.key) for each in error.errors]


def test_all_mistakes_of_a_file_are_listed_in_the_order_of_its_lines(tmp_path):
    found = several(
        tmp_path,
        "suite: bad\ncases:\n"
        "  - id: a\n    batch: q5s3\n    checks: [numerix]\n"
        "    layer: {num_heads: 8, num_kv_heads: 2, head_size: -1, dtype: bf16, scal: 2}\n"
        f"  - id: b\n    layer: {LAYER}\n    batch: [{{query_len: x, seq_len: -1}}]\n"
        f"  - id: c\n    layer: {LAYER}\n    batch: q1\n    cache: {{block_size: 0}}\n    path: pagd\n",
    )
    assert found == [
        (4, "cases[0].batch"),
        (5, "cases[0].checks[0]"),
        (6, "cases[0].layer.head_size"),
        (6, "cases[0].layer.dtype"),
        (6, "cases[0].layer.scal"),
        (9, "cases[1].batch[0].query_len"),
        (9, "cases[1].batch[0].seq_len"),
        (13, "cases[2].cache.block_size"),
        (14, "cases[2].path"),
    ]


def test_every_missing_key_is_named_unless_one_is_mistyped(tmp_path):
    text = "suite: bad\ncases:\n  - {id: a, batch: q1, layer: {num_heads: 8}}\n"
    assert several(tmp_path, text) == [(3, "cases[0].layer.num_kv_heads"), (3, "cases[0].layer.head_size")]
    path = tmp_path / "one.yaml"
    path.write_text(text.replace("num_heads", "num_head"))
    assert refusal_of(path).key == "cases[0].layer.num_head"


def test_a_mistake_that_a_matrix_repeats_is_reported_once(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text(
        "suite: bad\ndefaults:\n  layer: {num_heads: 0, num_kv_heads: 1, head_size: 8}\ncases:\n"
        "  - {id: a, batch: q1, matrix: {cache.block_size: [16, 32]}}\n  - {id: b, batch: q1}\n"
    )
    assert str(refusal_of(path)).count("num_heads must be above 0") == 1


def test_of_very_many_mistakes_ten_are_listed(tmp_path):
    cases = "".join(f"  - {{id: c{number}, bach: q1}}\n" for number in range(15))
    path = tmp_path / "many.yaml"
    path.write_text(f"suite: bad\ncases:\n{cases}")
    *shown, last = str(refusal_of(path)).splitlines()
    assert len(shown) == 10
    assert last == f"{path}: and 5 more mistakes"


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("TMP/none.yaml", snapshot("TMP/none.yaml: there is no such file; built-in suites: ...")),
        ("TMP", snapshot("TMP: this is a directory; name one file")),
        ("a\0b.yaml", snapshot("a\\x00b.yaml: cannot be read: embedded null byte")),
        (
            "/dev/zero",
            snapshot("/dev/zero:1:1: larger than 1000 bytes; split the file; in a case file, use matrix"),
        ),
    ],
)
def test_what_is_no_file_of_cases(plain, tmp_path, monkeypatch, ref, message):
    monkeypatch.setattr(yaml_tree, "MAX_BYTES", 1000)
    with pytest.raises(CaseFileError) as refused:
        load_suite(ref.replace("TMP", str(tmp_path)))
    assert plain(str(refused.value)) == message


def test_aliases_in_a_chain_count_as_deep_as_they_are(tmp_path):
    chain = "".join(f"  - &a{i} [[[[[*a{i - 1}]]]]]\n" for i in range(1, 200))
    path = tmp_path / "chain.yaml"
    path.write_text(f"suite: bad\ncases:\n  - &a0 x\n{chain}")
    error = refusal_of(path)
    assert "nested more than 40 deep" in str(error)
    assert (error.line, error.column, error.key) == (11, 14, "cases[8][0][0][0][0][0]")


def test_a_text_that_turns_the_direction_of_writing_is_refused(tmp_path):
    path = tmp_path / "bidi.yaml"
    for written in ("\u202e", '"\\u202e"', "\u2066", "\x85", "\u2028"):
        path.write_text(f"suite: a\ndescription: {written}\n", encoding="utf-8")
        assert re.search("is not allowed in YAML|an escape gives a control character", str(refusal_of(path)))


def test_a_message_about_a_long_word_is_short(tmp_path):
    path = tmp_path / "long.yaml"
    for text in ("!" + "t" * 50_000 + " x", "*" + "a" * 50_000, "{" + "k" * 50_000 + ": [}"):
        path.write_text(f"suite: a\ncases: {text}\n")
        assert len(str(refusal_of(path))) < 3000


@pytest.mark.parametrize("form", ["list", "string"])
def test_cases_that_are_large_and_many_are_refused_at_once(tmp_path, form):
    batch = {
        "list": f"{{requests: [{'{query_len: 1, seq_len: 9},' * 9000}]}}",
        "string": "_".join(["q1s2"] * 50_000),
    }[form]
    path = tmp_path / "large.yaml"
    scales = ", ".join(f"0.{number}" for number in range(1, 300))
    path.write_text(
        f"suite: a\ncases:\n- id: a\n  layer: {LAYER}\n  batch: {batch}\n  matrix: {{layer.scale: [{scales}]}}\n"
    )
    start = time.process_time()
    assert "hold too many values in all" in str(refusal_of(path))
    assert time.process_time() - start < 2
