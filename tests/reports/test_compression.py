"""Run files in compressed form: read by their names, and as ``.gz`` written so that a cut file can be read."""

import gzip
import lzma
import sys
import tracemalloc
from functools import partial

import pytest

from attncheck.errors import RunFileError
from attncheck.reports.run_file import store
from attncheck.reports.run_file.store import RunWriter, read_run

ZSTD = ("compression.zstd", "backports.zstd")


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_run_is_read_by_its_name(write, make, tmp_path, ending, pack):
    path = write(make("passed"))
    packed = tmp_path / f"run.jsonl.{ending}"
    packed.write_bytes(pack(path.read_bytes()))
    assert read_run(packed).records == read_run(path).records
    packed.write_bytes(path.read_bytes())
    with pytest.raises(RunFileError, match=f"is not compressed as its name states, by {ending}"):
        read_run(packed)


@pytest.mark.parametrize("name", ZSTD)
def test_zstd_is_read_by_any_of_its_packages(write, make, tmp_path, name, monkeypatch):
    module = pytest.importorskip(name)
    for other in ZSTD:
        if other != name:
            monkeypatch.setitem(sys.modules, other, None)
    path = write(make("passed"))
    packed = tmp_path / "run.jsonl.zst"
    packed.write_bytes(module.compress(path.read_bytes()))
    assert read_run(packed).records == read_run(path).records
    packed.write_bytes(path.read_bytes())
    with pytest.raises(RunFileError, match="compressed by zst"):
        read_run(packed)


def test_without_a_reader_of_zstd_the_message_states_what_to_install(tmp_path, monkeypatch):
    for name in ZSTD:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "run.jsonl.zst").write_bytes(b"anything")
    with pytest.raises(RunFileError, match=r"run\.jsonl\.zst: .*pip install backports\.zstd"):
        read_run(tmp_path / "run.jsonl.zst")


@pytest.mark.parametrize(("name", "unpack"), [("deep/er/run.jsonl", bytes), ("run.jsonl.gz", gzip.decompress)])
def test_every_record_is_in_the_file_as_soon_as_it_is_added(tmp_path, make, header, name, unpack):
    path = tmp_path / name
    records = [make("passed", check=check) for check in ("numerics", "lse")]
    with RunWriter(path, header) as writer:
        for count, record in enumerate(records, start=1):
            writer.add(record)
            assert len(read_run(path).records) == count
            assert not read_run(path).complete
    assert read_run(path).complete
    written = path.read_bytes()
    assert unpack(written).count(b"\n") == 4  # a whole file for any other program
    with pytest.raises(RunFileError, match="exists already"), RunWriter(path, header):
        pass
    assert path.read_bytes() == written


def test_a_gz_that_was_cut_anywhere_is_read_up_to_there(tmp_path, make, header):
    path = tmp_path / "run.jsonl.gz"
    with RunWriter(path, header) as writer:
        headed = path.stat().st_size
        for name in "abcdefgh":
            writer.add(make("passed", case_id=name))
    content = path.read_bytes()
    counts = []
    for size in range(headed, len(content), 3):
        path.write_bytes(content[:size])
        counts.append(len(read_run(path).records))
    assert counts == sorted(counts)
    assert set(counts) == set(range(9))


@pytest.mark.parametrize("ending", ["xz", "zst"])
def test_a_form_that_no_cut_file_could_be_read_in_is_refused(tmp_path, header, ending):
    path = tmp_path / f"run.jsonl.{ending}"
    with pytest.raises(RunFileError, match=r"name it \.jsonl or \.jsonl\.gz"), RunWriter(path, header):
        pass
    assert not path.exists()


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", partial(lzma.compress, preset=0))])
def test_of_a_file_that_decompresses_to_very_much_little_is_kept(tmp_path, ending, pack, monkeypatch):
    monkeypatch.setattr(store, "LONGEST_LINE", 2**21)
    path = tmp_path / f"run.jsonl.{ending}"
    path.write_bytes(pack(bytes(2**25)))
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(RunFileError, match="a line of more than 2097152 bytes"):
            read_run(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**23
    with pytest.raises(RunFileError, match="a line of more than"):
        read_run("/dev/zero")  # it is not read to its end


def test_a_file_of_too_many_lines_is_refused(write, make, tmp_path, monkeypatch):
    path = write(*(make("passed", case_id=f"case-{number}") for number in range(100)))
    monkeypatch.setattr(store, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(RunFileError, match=r"holds more than .* bytes; divide the run by --shard"):
        read_run(path)


def test_a_line_that_is_read_in_pieces_is_whole(write, make, monkeypatch, tmp_path):
    path = write(*(make("passed", case_id=f"case-{number}") for number in range(3)))
    expected = read_run(path)
    for size in (1, 7, 300):
        monkeypatch.setattr(store, "_CHUNK", size)
        assert read_run(path) == expected
