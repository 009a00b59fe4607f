"""Truths kept between runs: in a folder of one's own, and in one that others can write."""

import ast
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attncheck.cases.model import Tolerance
from attncheck.errors import BlindCaseError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth import shared_folder
from attncheck.harness.truth import truth as truth_module
from attncheck.harness.truth.shared_folder import SharedFolder, truths_folder, user_cache
from attncheck.harness.truth.truth import SOURCES, TruthCache, truth_of
from attncheck.reference.spec import MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import FastPrefillOptions, TreeOptions

CPU = torch.device("cpu")
SMALL = ((1, 9), (3, 20))
MLA = MLASpec(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


class Truths:
    """A folder, and caches over it that count what they compute."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.computed = folder, 0

        def count(*args, **options):
            self.computed += 1
            return truth_of(*args, **options)

        monkeypatch.setattr(truth_module, "truth_of", count)

    def of(self, case, seed=0, *, machine="m", stores=True, **options):
        """The truth, by a cache of a process's own."""
        cache = TruthCache(CPU, self.folder, machine=machine, stores=stores)
        return cache.truth_of(build_problem(case, seed), **options)

    def files(self):
        """The entries."""
        return list(SharedFolder(self.folder).sizes())


@pytest.fixture
def truths(tmp_path, monkeypatch):
    return Truths(tmp_path / "truths", monkeypatch)


def numbers(truth):
    return [truth.out, truth.lse, truth.budget.norm, truth.budget.peak, truth.budget.lse]


def assert_same(truth, other):
    for one, two in zip(numbers(truth), numbers(other), strict=True):
        assert one.dtype == two.dtype == torch.float64
        assert one.shape == two.shape
        assert torch.equal(one, two)
    assert (truth.params, truth.codes) == (other.params, other.codes)
    assert torch.equal(truth.rows.query, other.rows.query)
    assert torch.equal(truth.rows.values, other.rows.values)


LAYERS = {
    "plain": {},
    "value-head-size": {"head_size_v": 24, "dtype": "float32"},
    "no-visible-key": {"requests": ((5, 3), (1, 40))},
    "latent": {"num_kv_heads": 1, "head_size": 32, "mla": MLA},
    "codes": {"output_quant": OutputQuantSpec(dtype="fp8_e4m3", scale=0.01)},
    "tree": {"requests": ((4, 40),), "path": "tree", "options": TreeOptions(parents=(-1, 0, 0, 1))},
    "few-rows": {"requests": ((30, 30),), "path": "fast_prefill", "options": FastPrefillOptions(rows=3)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_stored_truth_is_the_computed_one(name, make_case, truths):
    layer = dict(LAYERS[name])
    case = make_case(*layer.pop("requests", SMALL), **layer)
    expected = truth_of(build_problem(case, 0), CPU, refuse_blindness=False)
    assert_same(truths.of(case, refuse_blindness=False), expected)
    assert truths.computed == 1
    assert_same(truths.of(case, refuse_blindness=False), expected)
    assert truths.computed == 1


def test_another_question_has_another_truth(make_case, truths, monkeypatch):
    case = make_case(*SMALL)
    plain = truths.of(case)
    wide = truths.of(replace(case, tolerance=Tolerance(factor=2.0, reason="a test")))
    assert torch.equal(wide.budget.norm, 2 * plain.budget.norm)
    assert_same(truths.of(case, seed=1), truth_of(build_problem(case, 1), CPU))
    truths.of(make_case(*SMALL, scale=0.3))
    truths.of(case, refuse_blindness=False)
    truths.of(case, machine="another")
    assert truths.computed == len(truths.files()) == 6
    truths.of(replace(case, id="renamed"))  # the same question
    problem = build_problem(case, 0)
    cache = TruthCache(CPU, truths.folder, machine="m")
    for name in ("query", "keys", "values"):
        other = replace(problem, **{name: -getattr(problem, name)})
        assert_same(cache.truth_of(other, refuse_blindness=False), truth_of(other, CPU, refuse_blindness=False))
    truths.computed -= 3
    assert truths.computed == 6
    monkeypatch.setattr(truth_module, "digest_of_sources", lambda: "edited")
    truths.of(case)
    monkeypatch.setattr(torch, "__version__", "9.9")
    truths.of(case)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    truths.of(case)
    assert truths.computed == len(truths.files()) == 9


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty"])
def test_a_damaged_entry_is_computed_and_stored_again(damage, make_case, truths):
    case = make_case(*SMALL)
    expected = truths.of(case)
    (file,) = truths.files()
    whole = file.read_bytes()
    file.write_bytes({"garbage": b"\x00\xff" * (len(whole) // 2), "truncated": whole[:-8], "empty": b""}[damage])
    assert_same(truths.of(case), expected)
    assert truths.computed == 2
    again = file.read_bytes()
    assert (again[32:-8], len(again)) == (whole[32:-8], len(whole))  # but for the checksum, and how long it took


@pytest.mark.parametrize(
    "wrong", ["zero budget", "negative budget", "nan output", "inf output", "nan lse", "inf lse", "negative duration"]
)
def test_numbers_that_no_truth_has_are_computed_again(wrong, make_case, truths):
    case = make_case(*SMALL)
    expected = truths.of(case)
    (file,) = truths.files()
    kind, _, part = wrong.partition(" ")
    value = {"zero": 0.0, "negative": -1.0, "nan": float("nan"), "inf": float("inf")}[kind]
    took_s = torch.tensor([-1.0 if part == "duration" else 0.5], dtype=torch.float64)
    held = torch.cat([*(each.flatten() for each in numbers(expected)), took_s])
    if part != "duration":
        held[{"output": 0, "lse": expected.out.numel(), "budget": len(held) - 2}[part]] = value
    assert SharedFolder(truths.folder).write(file.name, held.numpy().tobytes())
    assert_same(truths.of(case), expected)
    assert truths.computed == 2


def test_a_process_that_may_not_store_reads_and_learns_how_long_the_truth_took(make_case, truths):
    case = make_case(*SMALL)
    truths.of(case, stores=False)
    assert not truths.folder.exists()
    stored, read = truths.of(case), truths.of(case, stores=False)
    assert truths.computed == 2
    assert 0 < stored.computed_s == read.computed_s


def test_a_blind_case_is_refused_every_time(make_case, truths):
    case = make_case((1, 9), sliding_window=64)
    truths.of(case, refuse_blindness=False)
    for _ in range(2):
        with pytest.raises(BlindCaseError, match="no row of the batch has a key it could act on"):
            truths.of(case)
    assert len(truths.files()) == 1


def test_a_folder_that_cannot_be_used_changes_nothing(make_case, truths, monkeypatch):
    case = make_case(*SMALL)
    expected = truths.of(case)
    (file,) = truths.files()
    truths.folder.chmod(0o777)
    assert_same(truths.of(case), expected)
    truths.folder.chmod(0o700)
    monkeypatch.setattr(truth_module, "digest_of_sources", lambda: (_ for _ in ()).throw(OSError("no sources")))
    assert_same(truths.of(case), expected)
    monkeypatch.undo()
    cache = TruthCache(CPU, file / "below", stores=True)
    for _ in range(2):
        assert_same(cache.truth_of(build_problem(case, 0)), expected)


def test_a_full_disk_is_tried_once(make_case, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(SharedFolder, "write", lambda self, key, content: bool(tried.append(key)))
    cache = TruthCache(CPU, tmp_path / "truths", stores=True)
    for seed in (0, 1):
        problem = build_problem(make_case(*SMALL), seed)
        assert_same(cache.truth_of(problem), truth_of(problem, CPU))
    assert len(tried) == 1


def test_the_folder_is_trimmed_as_it_fills(make_case, tmp_path, monkeypatch):
    trims = []
    monkeypatch.setattr(SharedFolder, "trim", lambda self: trims.append(self))  # noqa: PLW0108 (a bound method)
    for seed, most_bytes, expected in ((0, 2**30, 1), (3, 16, 4)):
        monkeypatch.setattr(truth_module, "MOST_BYTES", most_bytes)
        cache = TruthCache(CPU, tmp_path / "truths", stores=True)
        for each in range(3):
            cache.truth_of(build_problem(make_case(*SMALL), seed + each))
        assert len(trims) == expected


def test_the_sources_are_all_that_truths_are_computed_by():
    """Every module of attncheck's that problem and truth import, and those import, is in the digest."""
    package = Path(truth_module.__file__).parents[2]
    found = [path for room in ("problem", "truth") for path in (package / "harness" / room).glob("*.py")]
    of_states = ("recurrent.py", "short_conv.py")  # truths of layers with a state are not kept
    due, seen = [path for path in found if path.name not in of_states], set()
    while due:
        path = due.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node):
                place = package.joinpath(*name.split(".")[1:])
                due += [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    # The names of causes, and of errors, are no part of a truth.
    others = ("errors.py", "reports/run_file/")
    names = {str(path.relative_to(package)) for path in seen}
    assert {"cases/model.py", "backends/dtypes.py"} < names  # and `reference`, which imports its parts lazily
    assert {name for name in names if not name.startswith((*SOURCES, *others))} == set()


def _imported(node):
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("attncheck."):
        return [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
    return []


CONTENT = bytes(range(256)) * 4


@pytest.fixture
def folder(tmp_path):
    made = SharedFolder(tmp_path / "cache" / "truths")
    assert made.write("key", CONTENT)
    return made


def test_what_is_written_is_read_and_is_the_users_alone(folder):
    assert folder.read("key", len(CONTENT)) == CONTENT
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert list(folder.sizes()) == [folder.path / "key"]  # no part of a file is left
    assert folder.fault() is None
    assert folder.lacks_room() is None


def test_a_file_that_is_not_what_was_written_is_not_read(folder):
    file = folder.path / "key"
    whole = file.read_bytes()
    assert folder.read("other", len(CONTENT)) is None
    assert folder.read("key", len(CONTENT) - 8) is None
    for damaged in (
        b"",
        whole[:20],
        whole[:-1],
        whole + b"x",
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:-1] + bytes([whole[-1] ^ 128]),
        os.urandom(len(whole)),
    ):
        file.write_bytes(damaged)
        assert folder.read("key", len(CONTENT)) is None
    file.write_bytes(whole)
    file.rename(folder.path / "renamed")
    assert folder.read("renamed", len(CONTENT)) is None


def test_only_plain_files_of_this_user_are_read(folder, monkeypatch):
    (folder.path / "key").rename(folder.path / "elsewhere")
    (folder.path / "key").symlink_to(folder.path / "elsewhere")
    assert folder.read("key", len(CONTENT)) is None
    (folder.path / "key").unlink()
    os.mkfifo(folder.path / "key")
    assert folder.read("key", len(CONTENT)) is None
    (folder.path / "elsewhere").replace(folder.path / "key")
    assert folder.read("key", len(CONTENT)) == CONTENT
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert folder.read("key", len(CONTENT)) is None
    fault = folder.fault()
    assert fault.startswith("belongs to the user ")
    assert fault.endswith("attncheck runs as 4321")


def test_a_folder_that_others_may_fill_is_at_fault(folder, tmp_path):
    folder.path.chmod(0o770)
    assert folder.fault() == "other users may write in it; chmod go-w makes it usable"
    folder.path.chmod(0o755)
    assert folder.fault() is None
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert SharedFolder(link).fault() == "is not a folder"
    assert SharedFolder(folder.path / "key" / "below").fault() == "cannot be looked at: Not a directory"
    assert SharedFolder(tmp_path / "none" / "yet").fault() is None


def test_a_full_disk_leaves_no_part_of_a_file(folder, monkeypatch):
    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not folder.write("new", CONTENT)
    assert [path.name for path in folder.sizes()] == ["key"]


def test_where_no_file_can_be_written_none_is(folder, monkeypatch):
    assert not SharedFolder(folder.path / "key" / "below").write("key", CONTENT)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder.path)
    assert folder.lacks_room() == f"{folder.path} is read-only"
    monkeypatch.undo()
    monkeypatch.setattr(shared_folder, "LONGEST_FILE", 2**62)
    assert str(folder.lacks_room()).startswith("the disk has ")


def test_a_long_content_is_not_written(folder, monkeypatch):
    monkeypatch.setattr(shared_folder, "LONGEST_FILE", len(CONTENT))
    assert folder.write("long", CONTENT + b"x")
    assert folder.write("short", CONTENT)
    assert {path.name for path in folder.sizes()} == {"key", "short"}


def test_the_least_recently_used_files_go_first(folder):
    for age, key in enumerate("abcd", start=1):
        folder.write(key, CONTENT)
        os.utime(folder.path / key, (0, 10_000 - age))  # d is the oldest
    (folder.path / "key").unlink()
    size = (folder.path / "a").stat().st_size
    folder.trim(4 * size)
    assert len(folder.sizes()) == 4
    assert folder.read("d", len(CONTENT)) == CONTENT  # and is now the latest
    folder.trim(4 * size - 1)
    assert [path.name for path in folder.sizes()] == ["b", "a", "d"]
    folder.trim(2 * size)
    assert [path.name for path in folder.sizes()] == ["d"]
    SharedFolder(folder.path / "none").trim(0)


def test_the_folder_is_one_of_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "attncheck"
    assert truths_folder({}) == tmp_path / "attncheck" / "truths"
    assert truths_folder({"ATTNCHECK_NO_CACHE": "1"}) is None
    assert truths_folder({"ATTNCHECK_NO_CACHE": ""}) is not None
