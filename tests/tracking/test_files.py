"""Lines that no longer count are taken out in one step, and what a killed process left is deleted."""

import pytest

from roll.tracking.files import JsonLines, keep_lines, read_json_lines, remove_partials, write_atomically


def test_only_wanted_lines_stay_and_the_file_goes_on(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    for step in range(5):
        lines.append({"step": step, "text": "ü\n", "none": None})
    lines.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "to')
    keep_lines(path, lambda record: record["step"] <= 2)
    assert [record["step"] for record in read_json_lines(path)] == [0, 1, 2]
    assert read_json_lines(path)[0] == {"step": 0, "text": "ü\n", "none": None}
    more = JsonLines(path)
    more.append({"step": 3})
    assert [record["step"] for record in read_json_lines(path)] == [0, 1, 2, 3]


def test_lines_that_are_taken_out_are_handed_over_while_they_are_still_there(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "text": "ü"}\n{"step": 3}\n')
    seen = []

    def put_aside(text):
        assert len(read_json_lines(path)) == 3
        seen.append(text)

    keep_lines(path, lambda record: record["step"] <= 1, put_aside)
    keep_lines(path, lambda record: record["step"] <= 1, put_aside)
    assert seen == ['{"step": 2, "text": "ü"}\n{"step": 3}\n'], "and nothing where nothing is taken out"


def test_a_file_that_is_not_there_stays_away(tmp_path):
    keep_lines(tmp_path / "none.jsonl", lambda record: True)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        keep_lines(path, lambda record: True)
    assert path.read_text().startswith('{"step": 1}\nnonsense')


def test_what_a_killed_process_left_beside_a_file_is_deleted_and_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "{}")
    (tmp_path / ".status.json.4711.partial").write_text("{")
    (tmp_path / ".other.json.4711.partial").write_text("{")
    remove_partials(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".other.json.4711.partial", "status.json"]
