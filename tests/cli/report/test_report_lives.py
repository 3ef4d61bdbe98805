"""report on runs that `ckptdelta run` has started: their attempts, goodput and steps lost, in text, JSON and on the page."""

import json
import os
import re
import time

import numpy as np
import pytest

from support_cli import check_documented, run, state, store  # noqa: F401
from support_page import BROWSER, Page, check_in_browser, tooltips

START = 1_700_000_000


def stamp(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(START + seconds)) + f".{int(seconds % 1 * 1000):03}Z"


def begin(number, at, checkpoint=None, run_name="gpt", **more):
    step = int(checkpoint.split("@")[1]) if checkpoint else None
    return {"event": "start", "run": run_name, "attempt": number, "time": stamp(at), "host": "here", "supervisor": 1, "pid": 2,
            "checkpoint": checkpoint, "from_step": step, "first_step": step, "reached": None, "suspect": None, "hosts": ["node1", "node2"],
            "bad_hosts": None, "excluded": None, "command": ["true"], **more}


def finish(number, at, run_name="gpt", end=1, **more):
    return {"event": "end", "run": run_name, "attempt": number, "time": stamp(at), "end": end, "hung": False, "anomaly": None, "unhealthy": False,
            "stopped_by": None, "last_step": None, "first_trained": None, "last_trained": None, "resume_s": None, "trained_s": None, "hang": None,
            "first_save_s": None, "status": None, "alarms": 0, "alarm": None, "alarm_step": None, "alarm_acts": False, "bad_hosts": None,
            "excluded": None, "reason": "exit status 0", "verdict": "done", **({"exit": 0} if end == 1 else {}), **more}


def write(store, lines):
    (store.path / "attempts.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def lives(store, **options):
    found = store.call("report", "--json", **options).json()
    check_documented(found, "`report`")
    return found["supervised"]


def page_of(store, **options):
    out = store.folder / "page.html"
    store.call("report", "-q", "--html", out, **options)
    return out.read_text()


# Steps 1 to 101 in 100 s, of which 41 to 101 were lost; a hang; then 41 to 141 in 50 s. 300 s in all.
STORY = [
    begin(1, 0),
    finish(1, 120, first_trained=1, last_trained=101, resume_s=10, trained_s=100, exit=1, reason="exit status <1>", verdict="restart"),
    begin(2, 130, "gpt@40"),
    finish(2, 200, hung=True, reason="hung: no step", resume_s=20, first_trained=41, last_trained=41),
    begin(3, 210, "gpt@40"),
    finish(3, 300, first_trained=41, last_trained=141, resume_s=30, trained_s=50),
]


@pytest.fixture
def told(store):
    store.save(10, state(1, 1), run_name="gpt")
    write(store, STORY)
    return store


def test_figures(told):
    """Useful are 39 of the 100 steps after the first one, and all of the third attempt."""
    life, = lives(told)
    useful = 100 * 39 / 100 + 50
    assert life == {"run": "gpt", "attempts": 3, "reported": 3, "start": "2023-11-14T22:13:20Z", "end": "2023-11-14T22:18:20Z", "wall_s": 300,
                    "useful_s": pytest.approx(useful), "goodput": pytest.approx(useful / 300), "steps_lost": 62, "resume_s": 25, "suspect": 0,
                    "ended": "done", "reason": "exit status 0", "verdict": "done"}
    text = told.call("report").out
    row, = (line for line in text.splitlines() if line.startswith("gpt") and "%" in line)
    assert row.split()[:4] == ["gpt", "3", "29.7", "%"] and " 62 " in row and row.endswith("exit status 0  done")


def test_a_longer_way_back_loses_more(told):
    """The fourth attempt starts from step 20, so all before lose what is beyond."""
    write(told, [*STORY[:-1], {**STORY[-1], "exit": 3, "verdict": "restart"}, begin(4, 310, "gpt@20"), finish(4, 400, reason="exit status 0")])
    life, = lives(told)
    assert life["steps_lost"] == 81 + 1 + 101 and life["useful_s"] == pytest.approx(100 * 19 / 100)
    write(told, [*STORY, begin(4, 310), finish(4, 400)])
    life, = lives(told)
    assert life["steps_lost"] == 101 + 1 + 101 and life["useful_s"] == 0, "it starts over"


def test_without_reported_steps(store):
    """Time between saves counts, as far as they were kept."""
    began = time.time() - START
    for step in (10, 20, 30):
        store.save(step, state(1, step), run_name="gpt" if step < 30 else "gpt~2")
        time.sleep(0.02)
    write(store, [begin(1, began - 60), finish(1, began + 60)])
    life, = lives(store)
    assert life["reported"] == 0 and life["steps_lost"] == 0
    assert 0.03 < life["useful_s"] < 60 and life["goodput"] == pytest.approx(life["useful_s"] / 120, rel=0.01)
    write(store, [begin(1, began - 60), finish(1, began + 60), begin(2, began + 70, "gpt@20"), finish(2, began + 80)])
    shorter, = lives(store)
    assert shorter["steps_lost"] == 10 and 0 < shorter["useful_s"] < life["useful_s"]
    assert " 10+ " in store.call("report").out
    write(store, [begin(1, began - 60)])
    running, = lives(store)
    assert running["end"] is None and running["ended"] == "running" and 60 <= running["wall_s"] < 120
    write(store, [begin(1, 0), finish(1, 10)])
    unknown, = lives(store)
    assert unknown["goodput"] is None and unknown["useful_s"] is None


def test_suspect_checkpoints(told):
    bad = {**state(1, 1), "layers.0.weight": np.full((64, 64), np.nan, np.float32)}
    told.save(50, bad, run_name="gpt", expect_message="suspect")
    now = time.time() - START
    write(told, [begin(1, now - 100), finish(1, now + 100, end=2, signal=9, reason="killed by SIGKILL")])
    life, = lives(told)
    assert life["suspect"] == 1 and life["ended"] == "failed" and life["reason"] == "killed by SIGKILL"
    text = page_of(told)
    assert "step 50 is suspect" in tooltips(text, "Attempts: gpt")
    assert 'class="dot s5"' in text.split("Attempts: gpt")[1].split("</figure>")[0]


def test_the_page(told):
    text = page_of(told)
    parsed = Page(text)
    assert "Attempts" in parsed.texts["h2"] and "Attempts: gpt" in parsed.texts["figcaption"]
    titles = tooltips(text, "Attempts: gpt")
    bars = [t for t in titles if t.startswith("attempt ")]
    assert len(bars) == 3 and bars[0] == "attempt 1: exit status <1>; began 2023-11-14T22:13:20Z, took 2 min 0 s, made steps 1 to 101, on node1 node2"
    assert any(t.startswith("attempt 2: hung: no step; ") and "from step 40" in t for t in bars)
    assert [t for t in titles if "again" in t] == ["steps 41 to 101 were made again"]
    figure = text.split("Attempts: gpt")[1].split("</figure>")[0]
    assert "Goodput 29.7\xa0%. 3 attempts, 62 steps lost. By minutes since 2023-11-14T22:13:20Z." in figure
    thick = re.findall(r'class="bar (\w+)" d="M([0-9.]+) 34.0L([0-9.]+) 34.0"', figure.split("</svg>")[0])
    assert thick[0] == ("failed", "33.3", "366.7") and thick[-1] == ("done", "800.0", "966.7")
    assert [kind for kind, _, _ in thick] == ["failed", "hung", "done"]
    assert re.findall(r'class="thin (\w+)" d="M([0-9.]+) 34.0L([0-9.]+) 34.0"', figure)[0] == ("failed", "0.0", "400.0")
    assert re.findall(r'class="again" d="M([0-9.]+) 48.0L([0-9.]+) ', figure)[0] == ("163.3", "366.7")
    labels = re.findall(r'class="tag" style="top:0;left:([0-9.]+)%[^"]*">([^<]*)<', figure)
    assert labels == [("70.0", "3 done"), ("0.0", "1 failed"), ("43.3", "2 hung")]
    assert re.findall(r'<span style="left:[0-9.]+%">(\d+)<', figure) == ["0", "1", "2", "3", "4", "5"]
    for x in re.findall(r"[ML](-?[0-9.]+) ", figure):
        assert 0 <= float(x) <= 1000
    for legend in ("failed", "hung", "done", "made again", "save"):
        assert f"</svg>{legend}</li>" in figure
    assert "</svg>stopped<" not in figure and "suspect" not in figure


def test_how_attempts_end(store):
    """Each end has a look of its own."""
    store.save(10, state(1, 1), run_name="other")
    ends = [("stopped", {"stopped_by": 15, "end": 2, "signal": 15}), ("unhealthy", {"unhealthy": True}), ("lost", {"end": 4, "reason": "supervisor died"}),
            ("failed", {"end": 3, "errno": 2})]
    lines = []
    for i, (_, fields) in enumerate(ends):
        lines += [begin(i + 1, 100 * i), finish(i + 1, 100 * i + 90, **fields)]
    write(store, [*lines, begin(5, 400), begin(6, 500)])
    figure = page_of(store).split("Attempts: gpt")[1].split("</svg>")[0]
    kinds = re.findall(r'class="bar (\w+)"', figure)
    assert kinds == [kind for kind, _ in ends] + ["lost", "running"], "an attempt that another one has followed is over"
    style = page_of(store).split("<style>")[1].split("</style>")[0]
    dashes = re.findall(r"stroke-dasharray:([0-9 ]+)", style)
    assert len(dashes) == len(set(dashes)) == 7, "they differ not by colour alone; one that is done is solid"


def test_runs_without_attempts(store):
    store.save(10, state(1, 1), run_name="gpt")
    assert lives(store) == [] and "Attempts" not in page_of(store) and "GOODPUT" not in store.call("report").out
    write(store, [begin(1, 0, run_name="other"), finish(1, 10, run_name="other")])
    text = page_of(store)
    assert "Attempts: other" in text and "Attempts: gpt" not in text


def test_names_and_hosts_are_escaped_and_short(store):
    store.save(10, state(1, 1), run_name="gpt")
    hosts = [f"node{i}" for i in range(1000)]
    write(store, [begin(1, 0, hosts=[*hosts, "<b>&"], run_name="a<i>"), finish(1, 10, run_name="a<i>", reason="<u>&")])
    text = page_of(store)
    Page(text)
    assert not re.search(r"<b>|<u>|a<i>|&(?!amp;|lt;|gt;|quot;|#39;)", text)
    title = next(t for t in tooltips(text, "Attempts: a<i>") if t.startswith("attempt 1"))
    assert "<u>&" in title and "on node0 node1 " in title and title.endswith(" ...") and len(title) < 300


def test_a_damaged_journal(told):
    write(told, ["{", *STORY, "[1]", '{"event":"end","run":"gpt","attempt":99,"time":"x"}'])
    with_note = {"expect_message": f"2 lines of {told.path}/attempts.jsonl are damaged and left out"}
    assert lives(told, **with_note)[0]["attempts"] == 3
    assert "Attempts: gpt" in page_of(told, **with_note)
    (told.path / "attempts.jsonl").unlink()
    (told.path / "attempts.jsonl").mkdir()
    with_note = {"expect_message": "cannot tell what the attempts of runs came to: cannot "}
    assert lives(told, **with_note) == []
    for wrong in ({"time": None}, {"first_trained": 9, "last_trained": 3}, {"trained_s": -1, "resume_s": 1e300}, {"first_trained": 2**63 - 1, "last_trained": 2**63 - 1}):
        (told.path / "attempts.jsonl").is_dir() and (told.path / "attempts.jsonl").rmdir()
        write(told, [begin(1, 50), {**STORY[1], **wrong}, begin(2, 20), finish(2, 10)])
        life, = lives(told)
        assert life["wall_s"] >= 0 and (life["goodput"] is None or 0 <= life["goodput"] <= 1)
        Page(page_of(told))


def test_a_long_journal(store):
    """Ten thousand attempts become a summary; of forty thousand, the first ones are left out."""
    store.save(10, state(1, 1), run_name="gpt")
    lines = []
    for i in range(1, 10001):
        lines += [begin(i, 10 * i, "gpt@10"), finish(i, 10 * i + 5, exit=1, reason="exit status 1", first_trained=11, last_trained=12, trained_s=1, resume_s=2)]
    write(store, lines)
    life, = lives(store)
    assert life["attempts"] == 10000 and life["steps_lost"] == 2 * 9999 and life["useful_s"] == pytest.approx(1)
    text = page_of(store)
    bars = [t for t in tooltips(text, "Attempts: gpt") if t.startswith("attempt")]
    assert 150 < len(bars) <= 500 and bars[0].startswith("attempts 1 to 4") and "40 failed" in bars[0]
    assert sum(int(re.search(r"(\d+) failed", t)[1]) for t in bars if "failed" in t) + sum(t.startswith("attempt ") for t in bars) == 10000
    assert len(text) < 250_000
    (store.path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open(store.path / "attempts.jsonl", "a") as more:
        for i in range(10001, 40001):
            more.write(json.dumps(begin(i, 10 * i, "gpt@10")) + "\n" + json.dumps(finish(i, 10 * i + 5, exit=1)) + "\n")
    done = store.call("report", "--json").json()
    life, = done["supervised"]
    assert done["attempts_left_out"] + life["attempts"] == 40000 and 16384 <= life["attempts"] <= 32768
    assert f"The first {done['attempts_left_out']} attempts of the journal are left out." in page_of(store)


def test_many_runs(store):
    """The six with most attempts are drawn; the table has all."""
    store.save(10, state(1, 1), run_name="gpt")
    lines = [line for r in range(9) for i in range(1, r + 2) for line in (begin(i, 100 * i, run_name=f"r{r}"), finish(i, 100 * i + 90, run_name=f"r{r}"))]
    write(store, lines)
    assert [life["run"] for life in lives(store)] == [f"r{r}" for r in range(8, -1, -1)]
    text = page_of(store)
    assert re.findall(r"<figcaption>Attempts: (\w+)", text) == [f"r{r}" for r in range(8, 2, -1)]
    assert "Drawn are the 6 runs with most attempts." in text and set(f"r{r}" for r in range(9)) <= set(Page(text).texts["td"])


def test_attempts_of_a_real_run(store):
    store.save(10, state(1, 1), run_name="gpt")
    run("run", store.path, "gpt", "-q", "--", "true")
    life, = lives(store)
    assert life["attempts"] == 1 and life["ended"] == "done" and life["reason"] and life["verdict"]
    attempt, = store.json("attempts")["attempts"]
    assert attempt["trained_s"] is None


@pytest.mark.skipif(not BROWSER, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.skipif(bool(os.environ.get("CKPTDELTA_SAN")), reason="a browser finds no more under sanitizers")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(told, tmp_path, width, dark):
    check_in_browser(page_of(told), tmp_path, width, dark)
