"""timeline: the times of saves, in the order in which they ended, as text and as a picture."""

import re
import sqlite3
import xml.etree.ElementTree as ET

import pytest

from support_cli import FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401

SVG = "{http://www.w3.org/2000/svg}"
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
        assert s["raw_bytes"] > 0 and s["stored_bytes"] == s["written_bytes"] > 0
    assert [s["step"] for s in saves(store, "--last", 2)] == [9, 2]
    assert [s["step"] for s in saves(store, "--run", "a", "--last", 2)] == [1, 9]
    lines = run("timeline", store.path).out.splitlines()
    assert lines[0].split() == ["RUN", "STEP", "RAW", "STORED", "WRITTEN", "WAITED", "ANALYSE", "ENCODE", "WRITE", "SYNC", "TOTAL", "DURABLE"]
    assert len(lines) == 5


def test_materialized_copies_count_as_written(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step), "--newest-load-cost", 1)
    report = store.json("report")
    items = saves(store)
    assert report["materialized_bytes"] > 0
    assert items[0]["written_bytes"] == items[0]["stored_bytes"]
    assert items[-1]["written_bytes"] == items[-1]["stored_bytes"] + report["materialized_bytes"]
    assert report["written"] == {"checkpoints": 3, "written_bytes": sum(s["written_bytes"] for s in items),
                                 "stored_bytes": sum(s["stored_bytes"] for s in items)}
    heading, *rows = [line.split("  ") for line in store.call("list").out.splitlines()]
    sizes = [[cell.strip() for cell in row if cell][5:7] for row in rows]
    assert "WRITTEN" in " ".join(heading) and sizes[0][0] == sizes[0][1] and sizes[2][0] != sizes[2][1]
    assert "written: " in store.call("report", "-v").out
    store.call("rebuild")
    assert [[cell.strip() for cell in line.split("  ") if cell][6] for line in store.call("list").out.splitlines()[1:]] == ["-"] * 3
    assert "written: " not in store.call("report", "-v").out and store.json("report")["written"]["checkpoints"] == 0


def test_a_rebuild_loses_times_and_says_so(store):
    store.save(1, state(1))
    assert "the times of its save (timeline) are lost" in store.call("rebuild").out
    assert saves(store) == []
    assert "no save" in run("timeline", store.path).out


def titles_of(picture):
    """The tooltips of all bars of saves."""
    root = ET.parse(picture).getroot()
    assert root.tag == SVG + "svg"
    return [r.find(SVG + "title").text for r in root.iter(SVG + "rect") if r.find(SVG + "title") is not None and r.get("class") != "cut"]


def test_the_picture(store, tmp_path):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    picture = tmp_path / "saves.svg"
    assert store.call("timeline", "--svg", picture).out == f"wrote {picture}\n"
    assert {title.split(",")[0] for title in titles_of(picture)} == {"a@1", "a@2", "a@3"}
    sizes = {title.split(":")[0].split(", ")[1] for title in titles_of(picture)}
    assert all(re.fullmatch(r"[0-9.]+ (B|KiB) of 4[0-9.]+ KiB", size) for size in sizes), sizes
    for r in ET.parse(picture).getroot().iter(SVG + "rect"):
        assert 0 <= float(r.get("x", 0)) and float(r.get("x", 0)) + float(r.get("width")) <= 960.1
    assert store.call("timeline", "--svg", picture, "-q").out == ""
    assert store.call("timeline", "--svg", picture, "--json").json()["saves"]
    assert store.call("timeline", "--svg", "-").out == picture.read_text()
    store.call("timeline", "--svg", "-", "--json", expect=USAGE)


@pytest.mark.parametrize("command", [("timeline", "--svg"), ("report", "--html")])
def test_only_files_of_its_own_are_replaced(store, command):
    """Pages and pictures are treated alike."""
    store.save(1, state(1))
    out = store.folder / "drawn"
    assert store.call(*command, out).out.splitlines()[-1] == f"wrote {out}"
    first = out.read_bytes()
    store.save(2, state(1, 2))
    store.call(*command, out)
    second = out.read_bytes()
    assert second != first
    for mine in (b"mine", second[1:], b""):
        out.write_bytes(mine)
        store.call(*command, out, expect=FAILED, expect_message="replace it with --force")
        assert out.read_bytes() == mine
    store.call(*command, out, "--force")
    assert out.read_bytes()[:60] == second[:60]
    assert not store.temporary_files()


def test_bad_input(store):
    store.save(1, state(1))
    run("timeline", store.path, "--last", "0", expect=USAGE)
    run("timeline", store.path, "--force", expect=USAGE)
    run("timeline", store.path, "--run", "nope", expect=NOT_FOUND, expect_message="nope")


# ---- times of ranks: the tests write them to the catalog, so that they are known

MS = 1_000_000
STAGES_OF = {  # rank: stage, from, to (ms), work (ms), bytes
    0: [("snapshot", 0, 4, 3, 800), ("analyse", 4, 10, 9, 800), ("encode", 6, 12, 10, 800), ("write", 7, 13, 2, 300),
        ("sync", 13, 20, 7, 300), ("wait", 20, 40, 0, 0), ("commit", 40, 50, 10, 0)],
    1: [("analyse", 5, 20, 30, 700), ("encode", 8, 25, 11, 700), ("write", 9, 26, 2, 200), ("sync", 26, 40, 14, 200), ("wait", 40, 40, 0, 0)],
    3: [("analyse", 5, 6, 1, 600), ("encode", 6, 7, 1, 600), ("write", 7, 8, 1, 100), ("sync", 8, 9, 1, 100), ("wait", 9, 40, 0, 0)],
}


def write_times(store, step, ranks=STAGES_OF):
    db = sqlite3.connect(store.path / "catalog.db")
    (key,) = db.execute("SELECT key FROM checkpoints WHERE step = ?", (step,)).fetchone()
    db.execute("DELETE FROM rank_timings WHERE checkpoint = ?", (key,))
    rows = [(key, rank, name, a * MS, b * MS, work * MS, size) for rank, stages in ranks.items() for name, a, b, work, size in stages]
    db.executemany("INSERT INTO rank_timings VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    db.commit()
    db.close()


def test_one_rank(store):
    store.save(1, state(1))
    (save,) = saves(store)
    (rank,) = save["ranks"]
    assert rank["rank"] == 0
    assert [s["stage"] for s in rank["stages"]] == ["analyse", "encode", "write", "sync", "commit"]
    for s in rank["stages"]:
        assert 0 <= s["begin_s"] <= s["end_s"] <= save["total_s"] + 0.5
    assert sum(s["work_s"] for s in rank["stages"] if s["stage"] == "sync") == save["sync_s"]
    lines = run("timeline", store.path, "--ranks").out.splitlines()
    assert lines[0].split() == ["RUN", "STEP", "RANK", "RAW", "STORED", "WRITTEN", "WAITED", "ANALYSE", "ENCODE", "WRITE", "SYNC", "OTHERS", "COMMIT",
                                "TOTAL", "DURABLE"]
    assert len(lines) == 2 and lines[1].split()[:3] == ["a", "1", "0"]
    assert len(run("timeline", store.path).out.splitlines()[0].split()) == 12


def test_a_row_for_each_rank(store):
    for step in 1, 2:
        store.save(step, state(1, step))
    write_times(store, 2)
    rows = [line.split() for line in run("timeline", store.path).out.splitlines()]
    assert [r[:3] for r in rows[1:]] == [["a", "1", "0"], ["a", "2", "0"], ["a", "2", "1"], ["a", "2", "3"]]
    text = " ".join(rows[2])
    assert text.startswith("a 2 0 800 B 300 B 300 B 3.00 ms 9.00 ms 10 ms 2.00 ms 7.00 ms 20 ms 10 ms 50 ms")
    assert " ".join(rows[4]).startswith("a 2 3 600 B 100 B 100 B - 1.00 ms 1.00 ms 1.00 ms 1.00 ms 31 ms - 35 ms")
    ranks = saves(store)[1]["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1, 3]
    assert ranks[1]["stages"][0] == {"stage": "analyse", "begin_s": 0.005, "end_s": 0.02, "work_s": 0.03, "bytes": 700}


def lanes_of(picture):
    """Lanes by run and rank."""
    root = ET.parse(picture).getroot()
    return root, {(g.get("data-run"), int(g.get("data-rank"))): g for g in root.iter(SVG + "g")}


def bars_of(lane):
    return [r for r in lane.findall(SVG + "rect") if r.get("class") != "row"]


def place(bar):
    return [float(bar.get(name)) for name in ("x", "y", "width", "height")]


def test_a_lane_for_each_rank(store, tmp_path):
    """Stages before the wait share a box by their work. Waiting and the commit have their own times."""
    store.save(1, state(1))
    write_times(store, 1)
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    root, lanes = lanes_of(picture)
    # a lane for each rank, even if it reported nothing
    assert set(lanes) == {("a", rank) for rank in range(4)}
    floor = float(root.get("viewBox").split()[3])
    left, scale = 140, 800 / 50  # pixels per ms: the picture shows only this save
    tops = []
    for rank in range(4):
        bars = {r.get("class"): r for r in bars_of(lanes["a", rank])}
        assert (lanes["a", rank].find(SVG + "text").text or "").endswith(f"rank {rank}")
        stages = {name: (begin, end, work) for name, begin, end, work, _ in STAGES_OF.get(rank, [])}
        assert set(bars) == set(stages)
        shared = [name for name in stages if name not in ("wait", "commit")]
        work = sum(stages[name][2] for name in shared)
        y = None
        for name in shared:
            begin, end = stages[shared[0]][0], stages["wait"][0]
            x, top, width, height = place(bars[name])
            assert (x, width) == pytest.approx((left + begin * scale, (end - begin) * scale), abs=0.02)
            assert height == pytest.approx(28 * stages[name][2] / work, abs=0.02)
            assert y is None or top == pytest.approx(y, abs=0.03), "one below the other"
            y = top + height
            percent = 100 * stages[name][2] / work
            said = re.fullmatch(r"a@1, .* of 4.*: rank (\d) (\w+), (\S+) ms of work, (\d+) %", bars[name].find(SVG + "title").text)
            assert said and said[1] == str(rank) and said[2] == name and float(said[3]) == stages[name][2] and abs(int(said[4]) - percent) <= 0.5
        for name in set(stages) - set(shared):
            begin, end, _ = stages[name]
            x, top, width, height = place(bars[name])
            assert (x, width, height) == pytest.approx((left + begin * scale, max((end - begin) * scale, 0.5), 28), abs=0.02)
            assert bars[name].find(SVG + "title").text.endswith(f": rank {rank} {name}, {end - begin} ms")
        if bars:
            top = min(place(r)[1] for r in bars.values())
            assert top + 28 < floor and y == pytest.approx(top + 28, abs=0.05)
            tops.append(top)
    assert all(top + 28 < below for top, below in zip(tops, tops[1:])), "lanes do not overlap"


def set_ends(store, ends, stall=0):
    """Sets when the saves of steps ended, in ms, and how long training waited. A save takes 50 ms."""
    db = sqlite3.connect(store.path / "catalog.db")
    start = 1_700_000_000_000 * MS
    for step, end in ends.items():
        db.execute("UPDATE checkpoints SET created_ns = ? WHERE step = ?", (start + end * MS, step))
        db.execute("INSERT OR REPLACE INTO timings SELECT key, 'stall', ?, 0 FROM checkpoints WHERE step = ?", (stall * MS, step))
    db.commit()
    db.close()
    for step in ends:
        write_times(store, step, {0: STAGES_OF[0]})


def test_runs_have_lanes_and_idle_times_are_cut(store, tmp_path):
    for step, name in ((1, "a"), (2, "b"), (3, "a")):
        store.save(step, state(1, step), run_name=name)
    set_ends(store, {1: 50, 2: 90, 3: 3600_000}, stall=3)
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    root, lanes = lanes_of(picture)
    assert set(lanes) == {("a", 0), ("b", 0)}
    cut, = (r for r in root.iter(SVG + "rect") if r.get("class") == "cut")
    assert cut.find(SVG + "title").text == "60 min without a save"
    scale = (800 - 46) / 140  # 90 ms and 50 ms
    assert place(cut)[0] == pytest.approx(140 + 90 * scale, abs=0.1) and place(cut)[2] == pytest.approx(46, abs=0.1)
    first = {(lane, r.get("class")): place(r) for lane in lanes for r in reversed(bars_of(lanes[lane]))}
    assert first[("b", 0), "commit"][0] == pytest.approx(140 + 80 * scale, abs=0.05)
    assert first[("b", 0), "training"][2] == pytest.approx(3 * scale, abs=0.05)
    late = max(place(r)[0] for r in bars_of(lanes["a", 0]) if r.get("class") == "commit")
    assert late == pytest.approx(140 + (90 + 40) * scale + 46, abs=0.1)
    words = [t.text for t in root.iter(SVG + "text")]
    assert "60 min" in words and "22:13:20" in words and "23:13:19" in words
    assert any(text.startswith("Saves from 2023-11-14 on") for text in words)
    labels = [t.text.split()[0] for t in root.iter(SVG + "text") if t.get("class") == "label"]
    assert labels == ["a@1", "a@3", "b@2"]
    ticks = [t.text for t in root.iter(SVG + "text") if t.get("class") == "tick"]
    assert ticks[:3] == ["0 s", "0.02 s", "0.04 s"], "round numbers"
    run("timeline", store.path, "--svg", picture, "--run", "b")
    assert set(lanes_of(picture)[1]) == {("b", 0)}


def test_times_of_an_older_version(store, tmp_path):
    """Times that an older version saved are kept, and drawn by their shares. The next save upgrades the
    catalog."""
    store.save(1, state(1))
    db = sqlite3.connect(store.path / "catalog.db")
    # Stages overlap, so that their sum may exceed the whole. Here it does not, and a rest is left.
    db.execute("UPDATE timings SET ns = ? WHERE stage = 'total'", (db.execute("SELECT sum(ns) FROM timings").fetchone()[0] + MS,))
    db.commit()
    db.executescript("DROP TABLE suspects; DROP TABLE rank_timings; PRAGMA user_version = 5;")
    db.close()
    before = saves(store)
    assert len(before) == 1 and before[0]["ranks"] == []
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    _, lanes = lanes_of(picture)
    bars = bars_of(lanes["a", 0])
    assert [b.get("class") for b in bars][-1] == "rest"
    assert len({(place(b)[0], place(b)[2]) for b in bars}) == 1 and sum(place(b)[3] for b in bars) == pytest.approx(28, abs=0.1)
    assert run("timeline", store.path, "--ranks").out.splitlines()[1].split()[2] == "-"
    store.save(2, state(1, 2))
    after = saves(store)
    assert after[0] == before[0] and len(after[1]["ranks"]) == 1


def test_many_ranks(store, tmp_path):
    store.save(1, state(1))
    write_times(store, 1, {r: STAGES_OF[3] for r in range(40)})
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    root, lanes = lanes_of(picture)
    assert len(lanes) == 40
    last = bars_of(lanes["a", 39])
    assert float(last[0].get("y")) < float(root.get("viewBox").split()[3]) < 800
