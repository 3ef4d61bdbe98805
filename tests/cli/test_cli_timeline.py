"""timeline: the times of saves, in the order in which they ended, as text and as a picture."""

import sqlite3
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
    assert "written: " in store.call("report").out
    store.call("rebuild")
    assert [[cell.strip() for cell in line.split("  ") if cell][6] for line in store.call("list").out.splitlines()[1:]] == ["-"] * 3
    assert "written: " not in store.call("report").out and store.json("report")["written"]["checkpoints"] == 0


def test_a_rebuild_loses_times_and_says_so(store):
    store.save(1, state(1))
    assert "the times of its save (timeline) are lost" in store.call("rebuild").out
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


# ---- times of ranks: the tests write them to the catalog, so that they are known

SVG = "{http://www.w3.org/2000/svg}"
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
    root = ET.parse(picture).getroot()
    return root, {g.get("data-rank"): g for g in root.iter(SVG + "g")}


def test_a_lane_for_each_rank(store, tmp_path):
    store.save(1, state(1))
    write_times(store, 1)
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    root, lanes = lanes_of(picture)
    # training, and a lane for each rank, even if it reported nothing
    assert set(lanes) == {None, "0", "1", "2", "3"}
    floor = float(root.get("viewBox").split()[3])
    tops, scale = [], 830 / 50  # pixels per ms: the picture shows only this save
    for rank in "0123":
        bars = [r for r in lanes[rank].findall(SVG + "rect")]
        assert lanes[rank].find(SVG + "text").text == f"rank {rank}"
        stages = STAGES_OF.get(int(rank), [])
        assert [b.get("class") for b in bars] == [s[0] for s in stages]
        for bar, (name, begin, end, work, _) in zip(bars, stages):
            assert abs(float(bar.get("x")) - 110 - begin * scale) < 0.02
            assert abs(float(bar.get("width")) - max((end - begin) * scale, 0.5)) < 0.02
            assert float(bar.get("y")) + float(bar.get("height")) < floor
            title = bar.find(SVG + "title").text
            more = "" if not work else f", training waited {work} ms" if name == "snapshot" else f", {work} ms of work"
            assert title == f"step 1: rank {rank} {name} {end - begin} ms{more}"
        if bars:
            by_name = {b.get("class"): b for b in bars}
            rows = [(float(by_name[n].get("y")), float(by_name[n].get("height"))) for n in ("analyse", "encode", "write")]
            # one below the other
            assert all(y + height <= below + 0.11 for (y, height), (below, _) in zip(rows, rows[1:]))
            assert rows[0][0] == float(by_name["sync"].get("y"))
            tops.append((rows[0][0], float(by_name["sync"].get("height"))))
    assert all(y + height <= below for (y, height), (below, _) in zip(tops, tops[1:]))  # lanes do not overlap


def test_times_of_an_older_version(store, tmp_path):
    """Times that an older version saved are kept, and drawn by their shares. The next save upgrades the
    catalog."""
    store.save(1, state(1))
    db = sqlite3.connect(store.path / "catalog.db")
    db.executescript("DROP TABLE rank_timings; PRAGMA user_version = 5;")
    db.close()
    before = saves(store)
    assert len(before) == 1 and before[0]["ranks"] == []
    picture = tmp_path / "saves.svg"
    run("timeline", store.path, "--svg", picture)
    _, lanes = lanes_of(picture)
    assert [b.get("class") for b in lanes["0"].findall(SVG + "rect")][-1] == "rest"
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
    assert len(lanes) == 41
    last = lanes["39"].findall(SVG + "rect")
    assert float(last[0].get("y")) < float(root.get("viewBox").split()[3]) < 800
