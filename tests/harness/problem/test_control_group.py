"""What control groups leave, read from trees of folders like those of the kernel."""

import pytest

from attncheck.harness import host
from attncheck.harness.host import free_group_bytes, free_host_bytes, group_cores, oom_kills, usable_cores

GIB = 2**30


@pytest.fixture(autouse=True)
def group(tmp_path, monkeypatch):
    """A root without groups; this process is in ``/slice/pod``."""
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    belong(monkeypatch, tmp_path, "0::/slice/pod\n")
    return tmp_path


def belong(monkeypatch, folder, membership):
    (folder / "membership").write_text(membership)
    monkeypatch.setattr(host, "_MEMBERSHIP", folder / "membership")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups_or_limits_the_machine_counts(group, monkeypatch):
    assert (free_group_bytes(), group_cores(), oom_kills()) == (None, None, None)
    write(group / "slice/pod", memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert (free_group_bytes(), group_cores()) == (None, None)
    monkeypatch.setattr(host, "_free_machine_bytes", lambda: 3 * GIB)
    assert free_host_bytes() == 3 * GIB
    monkeypatch.setattr(host, "_MEMBERSHIP", group / "no/such/file")
    assert (free_group_bytes(), group_cores()) == (None, None)


def test_the_narrowest_group_around_the_process_counts(group, monkeypatch):
    stat = f"anon {GIB}\ninactive_file {GIB // 4}\nactive_file {GIB // 4}"
    write(group / "slice/pod", memory__max=8 * GIB, memory__current=2 * GIB, memory__stat=stat)
    assert free_group_bytes() == 6.5 * GIB
    write(group / "slice", memory__max=9 * GIB, memory__current=5 * GIB, memory__stat="inactive_file 0")
    assert free_group_bytes() == 4 * GIB
    write(group / "slice/pod", memory__high=4 * GIB)
    assert free_group_bytes() == 2.5 * GIB
    monkeypatch.setattr(host, "_free_machine_bytes", lambda: 64 * GIB)
    assert free_host_bytes() == 2.5 * GIB
    monkeypatch.setattr(host, "_free_machine_bytes", lambda: GIB)
    assert free_host_bytes() == GIB


def test_a_group_that_is_over_its_limit_has_nothing_left(group):
    write(group / "slice/pod", memory__max=GIB, memory__current=2 * GIB)
    assert free_group_bytes() == 0


def test_version_1_has_a_tree_for_each_controller(group, monkeypatch):
    belong(monkeypatch, group, "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n1:name=systemd:/\n0::/\n")
    stat = f"inactive_file 0\ntotal_inactive_file {GIB}"
    # A container sees its own group as the root, whatever its path is.
    write(group / "memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat=stat)
    write(group / "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    write(group / "cpu", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert (free_group_bytes(), group_cores(), oom_kills()) == (3 * GIB, 2.5, 3)
    write(group / "cpu/docker/1f", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(group / "memory/docker/1f", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB)
    assert (free_group_bytes(), group_cores()) == (GIB, 2.5)


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"), [("200000", 8, 2), ("50000", 8, 1), ("350000", 8, 3), ("1600000", 8, 8)]
)
def test_the_cores_of_a_quota_are_whole_and_at_least_one(group, monkeypatch, quota, affinity, cores):
    write(group / "slice", cpu__max=f"{quota} 100000")
    write(group / "slice/pod", cpu__max="max 100000", memory__events="low 0\noom_kill 7")
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(affinity)))
    assert (usable_cores(), oom_kills()) == (cores, 7)
