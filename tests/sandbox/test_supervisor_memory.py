from roll.sandbox import supervisor


def test_memory_is_measured_again_if_a_process_ended_meanwhile(monkeypatch):
    """Three processes share a block of 90 pages; one ends when it has been asked for its share."""
    living = {1, 2, 3}

    def share(pid, *_):
        part = 90 * supervisor._PAGE // len(living)
        living.discard(1)
        return part

    monkeypatch.setattr(supervisor, "_pages", lambda pid: (90, 0) if pid in living else None)
    monkeypatch.setattr(supervisor, "_memory_share", share)
    # 30 + 45 + 45 at first.
    assert supervisor.count_and_memory([1, 2, 3], 100 * supervisor._PAGE) == (2, 90 * supervisor._PAGE)


def test_processes_that_come_and_go_do_not_hide_their_memory(monkeypatch):
    """One process ends in each measurement."""
    measurements = []

    def share(pid, *_):
        if pid == 9:
            measurements.append(pid)
        return 50 * supervisor._PAGE

    monkeypatch.setattr(supervisor, "_pages", lambda pid: None if pid < len(measurements) else (90, 0))
    monkeypatch.setattr(supervisor, "_memory_share", share)
    _, memory = supervisor.count_and_memory(list(range(10)), 100 * supervisor._PAGE)
    assert memory == 8 * 50 * supervisor._PAGE and len(measurements) == 3
