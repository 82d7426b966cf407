"""Memory that is available: the machine's, or what the container may have."""

from atomrl.common.memory import available_memory


def test_available_memory_respects_the_limit_of_the_container(tmp_path):
    everything = available_memory(tmp_path)  # where nothing says more
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024 < everything
    for place, names in (
        ("sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        ("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        group, (limit, used, cached) = tmp_path / place, names
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.stat").write_text(f"anon 5\n{cached} 100\n")
        (group / used).write_text("400\n")
        (group / limit).write_text("1000\n")
        assert available_memory(tmp_path) == 1000 - (400 - 100)
        (group / limit).write_text("max\n")
        assert available_memory(tmp_path) == 8000 * 1024
