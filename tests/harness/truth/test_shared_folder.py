"""Files that processes share: whole or not there, of one user, and bounded."""

import errno
import os
from pathlib import Path

import pytest

from attncheck.harness.truth import shared_folder
from attncheck.harness.truth.shared_folder import SharedFolder, truths_folder, user_cache

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
    assert fault is not None
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
