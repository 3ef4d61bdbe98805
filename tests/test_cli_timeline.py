"""timeline: what saves took, in the order in which they ended, and as a picture."""

import xml.etree.ElementTree as ET

from support_cli import FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401

STAGES = ("stall_s", "analyse_s", "encode_s", "write_s", "sync_s")


def saves(store, *args):
    return store.json("timeline", *args)["saves"]


def test_times_add_up(store):
    for step in (5, 1, 9):
        store.save(step, state(1, step), "--base")
    store.save(2, state(1, 2), run_name="b")
    items = saves(store)
    assert [(s["run"], s["step"]) for s in items] == [("a", 5), ("a", 1), ("a", 9), ("b", 2)]
    for s in items:
        assert s["total_s"] > 0 and s["encode_s"] > 0 and s["sync_s"] > 0 and s["stall_s"] == 0
        assert s["sync_s"] + s["write_s"] < s["total_s"]
        assert s["raw_bytes"] > 0 and s["stored_bytes"] > 0
    assert [s["step"] for s in saves(store, "--last", 2)] == [9, 2]
    assert [s["step"] for s in saves(store, "--run", "a", "--last", 2)] == [1, 9]
    lines = run("timeline", store.path).out.splitlines()
    assert lines[0].split() == ["RUN", "STEP", "RAW", "STORED", "WAITED", "ANALYSE", "ENCODE", "WRITE", "SYNC", "TOTAL", "DURABLE"]
    assert len(lines) == 5


def test_a_rebuild_loses_them(store):
    store.save(1, state(1))
    store.call("rebuild", "-q")
    assert saves(store) == []
    assert "no save" in run("timeline", store.path).out


def test_the_picture(store, tmp_path):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    root = ET.parse(picture).getroot()
    assert root.tag.endswith("svg")
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.find("{http://www.w3.org/2000/svg}title") is not None]
    assert {int(r.find("{http://www.w3.org/2000/svg}title").text.split()[1].rstrip(":")) for r in bars} == {1, 2, 3}
    for r in bars:
        assert 0 <= float(r.get("x")) and float(r.get("x")) + float(r.get("width")) <= 961
    before = picture.read_bytes()
    run("timeline", store.path, "--svg", picture, expect=FAILED, expect_message="exists")
    assert picture.read_bytes() == before
    run("timeline", store.path, "--svg", picture, "--last", 1, "--force")
    assert picture.read_bytes() != before


def test_bad_input(store):
    store.save(1, state(1))
    run("timeline", store.path, "--last", "0", expect=USAGE)
    run("timeline", store.path, "--force", expect=USAGE)
    run("timeline", store.path, "--run", "nope", expect=NOT_FOUND, expect_message="nope")
