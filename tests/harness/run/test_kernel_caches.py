"""Caches of compiled kernels: where they lie, and what they hold."""

import getpass
from pathlib import Path

import pytest

from attncheck.harness.host import CacheContents, KernelCache, kernel_caches

FOLDERS = {"triton": "t", "inductor": "i", "flashinfer": "f/.cache/flashinfer"}


def folders(environment: dict[str, str]) -> dict[str, str]:
    return {cache.library: str(cache.folder) for cache in kernel_caches(environment)}


def test_the_variables_of_each_library_place_its_cache() -> None:
    placed = {"TRITON_CACHE_DIR": "t", "TORCHINDUCTOR_CACHE_DIR": "i", "FLASHINFER_WORKSPACE_BASE": "f"}
    assert folders(placed) == FOLDERS
    assert folders({"TRITON_HOME": "h"})["triton"] == "h/.triton/cache"


def test_without_variables_they_lie_where_the_libraries_put_them() -> None:
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    found = folders({})
    assert found["inductor"] == cache_dir_utils.default_cache_dir()
    assert found["triton"] == str(Path.home() / ".triton/cache")
    assert found["flashinfer"] == str(Path.home() / ".cache/flashinfer")


def test_a_user_without_a_name_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert "torchinductor_uid_" in folders({})["inductor"]


def test_files_are_counted_and_kernels_by_their_ending(tmp_path: Path) -> None:
    cache = KernelCache("triton", tmp_path / "cache", (".cubin", ".hsaco"))
    assert cache.contents() == CacheContents(0, 0, 0)
    for name, size in (("key/a.cubin", 100), ("key/a.json", 20), ("other/deep/b.hsaco", 3)):
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).write_bytes(b"x" * size)
    (tmp_path / "cache" / "gone.cubin").symlink_to("nowhere")  # as a file that vanishes between the two looks
    assert cache.contents() == CacheContents(3, 123, 2)
