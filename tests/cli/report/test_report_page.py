"""report --html: one page without other files, with any names, in light and dark, on narrow and wide
screens."""

import html
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from support_cli import DOC, FAILED, run, state, store  # noqa: F401
from support_page import BROWSER, Page, check_in_browser, tooltips

METRIC = "<u>loss&"
HOSTILE = "a<b>&\"c'<script>alert(1)</script>\n"
SECTIONS = {"Runs", "Roles", "Newest checkpoints", "Fidelities", "Days and months", "Retention", "Cost", "Projection", "Tensors", "Checkpoints"}
FIGURES = {"Stored against full copies", "Share of a full copy", "Bytes written", "Error of lossy checkpoints", "Time of saves", "Lineage", METRIC}


def fill(store):
    """Two runs, lossy and exact, and a tensor whose name is markup."""
    for step in range(10, 100, 10):
        tensors = {**state(1, step), HOSTILE: np.full(100, step, np.float32)}
        store.save(step, tensors, *(["--fidelity", "near"] if step > 50 else []), "--metric", f"{METRIC}={5 - step / 50}", run_name="gpt")
    branch = "gpt~2-" + "long-name-of-a-branch-" * 5
    store.save(55, state(1, 55), "--parent", "gpt@50", "-q", run_name=branch)
    store.save(75, state(1, 75), run_name=branch)
    store.save(85, state(1, 75), "--base", run_name=branch)
    store.call("tag", "best", "gpt@30", "-q")
    store.call("pin", "gpt@80", "-q")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    from support_cli import Store
    store = Store(tmp_path_factory.mktemp("<&\" 'store"))
    fill(store)
    prices = store.folder / "prices.json"
    prices.write_text(json.dumps({"name": "<i>&cheap\"'", "date": "2026-02-03", "currency": "<b>&", "per_gb_month": 20,
                                  "per_1000_puts": 1, "egress_per_gb": 7}))
    out = store.folder / "page.html"
    store.call("report", "-q", "--html", out, "--prices", prices, "--until", 1000, "--keep-last", 1)
    return out.read_text(encoding="utf-8"), store


def test_the_page_is_well_formed_and_complete(page):
    text, store = page
    parsed = Page(text)
    assert text.startswith("<!doctype html>\n") and text.endswith("</html>\n")
    assert set(parsed.texts["h2"]) == SECTIONS
    captions = {"".join(text) for text in parsed.texts["figcaption"]}
    assert captions == FIGURES | {f"Bits by layer: {name}" for name in {c["run"] for c in store.checkpoints()}}
    assert parsed.tags.count("svg") == parsed.tags.count("figure") == len(captions)
    assert parsed.tags.count("h1") == 1 and ("html", "lang", "en") in parsed.attributes
    cells = parsed.texts["td"]
    assert html.unescape(HOSTILE).replace("\n", "\\x0a") in cells, "the name is there as it is"
    report = store.json("report")
    for row in report["by_run"]:
        assert row["run"] in cells and any(text.startswith(f"{row['run']}: ") for text in parsed.texts["span"])
    named = {re.split("[,:]", title)[0] for title in parsed.texts["title"]}
    assert {f"{c['run']}@{c['step']}" for c in report["by_checkpoint"]} <= named
    assert any("<i>&cheap\"', 2026-02-03" in line for line in parsed.texts["p"])
    assert any(line.startswith(str(store.path)) for line in parsed.texts["p"])
    assert {"@best", "pinned"} <= set(parsed.texts["span"])
    assert not re.search(r"chunk file|manifest|catalog|page cache", text), "no internals"


def test_the_headline(page):
    text, store = page
    parsed = Page(text)
    r = store.json("report", "--prices", store.folder / "prices.json")
    saved, share = r["raw_bytes"] - r["stored_bytes"], 100 * r["stored_bytes"] / r["raw_bytes"]
    hero = text.split('<p class="hero">')[1].split("</p>")[0]
    assert hero == f"{saved / 1024:.1f} KiB saved of {r['raw_bytes'] / 1024:.1f} KiB ({int(100 - share)}\xa0%)"
    assert f"Stored: {share:.1f}\xa0% of full copies" in parsed.texts["p"]
    assert ("div", "style", f"width:{share:.2f}%") in parsed.attributes
    assert f"{r['cost']['saved_per_month']:.2g} <b>&" in parsed.texts["dd"]
    out = store.folder / "assumed.html"
    said = store.call("report", "--html", out).out.splitlines()
    assert said[0].startswith("saved you ") and said[1:] == [f"wrote {out}"]
    assumed = Page(out.read_text())
    assert any(line.endswith("at an assumed price of 0.02 USD per GB. ") for line in assumed.texts["p"])
    assert f"{saved * 0.02 / 1e9:.2g} USD" in assumed.texts["dd"]


def test_curves_show_the_figures_of_checkpoints(page):
    text, store = page
    checkpoints = store.json("report")["by_checkpoint"]
    times = {f"{s['run']}@{s['step']}": s["written_bytes"] for s in store.json("timeline")["saves"]}
    names = [f"{c['run']}@{c['step']}" for c in checkpoints]
    shares = dict(t.split(": ") for t in tooltips(text, "Share of a full copy"))
    assert list(shares) == names
    for name, c in zip(names, checkpoints):
        assert float(shares[name].split()[0]) == pytest.approx(100 * c["stored_bytes"] / c["raw_bytes"], rel=0.05)
    written = dict(t.split(": ") for t in tooltips(text, "Bytes written"))
    assert written.keys() == times.keys()
    for name, size in times.items():
        assert float(written[name].split()[0]) == pytest.approx(size / 1024, abs=0.051)
    assert dict(t.split(": ") for t in tooltips(text, METRIC)) == {f"gpt@{s}": f"{5 - s / 50:.6g}" for s in range(10, 100, 10)}
    errors = dict(t.split(": ") for t in tooltips(text, "Error of lossy checkpoints"))
    assert errors.keys() == {f"gpt@{s}" for s in (60, 70, 80, 90)}
    for name, error in errors.items():
        shown = max(t["rel_l2"] for t in store.json("show", name)["tensors"] if t["role"] == "weight")
        assert float(error.split()[0]) == pytest.approx(100 * shown, rel=0.06)
    bits = dict(t.rsplit(": ", 1) for t in tooltips(text, "Bits by layer: gpt"))
    assert len([t for t in bits if t.startswith("layers.0, ")]) == 9
    weights = [t for t in store.json("show", "gpt@20")["tensors"] if t["name"] in ("layers.0.weight", "layers.0.bias")]
    expected = 8 * sum(t["stored_bytes"] for t in weights) / sum(t["elements"] for t in weights)
    assert float(bits["layers.0, gpt@20"].split()[0]) == pytest.approx(expected, rel=0.006)


def test_the_page_loads_and_runs_nothing(page):
    text, _ = page
    parsed = Page(text)
    assert "http" not in text and "//" not in text.replace(str(page[1].path), "")
    assert not re.search(r"url\(|@import|javascript:|<script|<link|<img|\bon\w+=", text)
    assert not {name for _, name, _ in parsed.attributes} & {"href", "src", "srcset", "action", "data", "xlink:href"}
    for name in ("<b>", "<i>&", "<script>", "&\"c", "<&"):
        assert name not in text, f"{name} is not escaped"
    assert not re.search(r"&(?!amp;|lt;|gt;|quot;|#39;)", text)


def test_shapes_stay_in_their_drawings(page):
    parsed = Page(page[0])
    boxes = [value for tag, name, value in parsed.attributes if tag == "svg" and name == "viewbox"]
    assert boxes[:6] == ["0 0 1000 300"] * 6 and boxes[-1] == "0 0 1000 112" and len(boxes) == 9
    for _, name, value in parsed.attributes:
        if name == "d":
            assert re.fullmatch(r"([MLHh](-?[0-9.]+)( -?[0-9.]+)?)+Z?", value), value
            for x, y in re.findall(r"[ML](-?[0-9.]+) (-?[0-9.]+)", value):
                assert 0 <= float(x) <= 1000 and 0 <= float(y) <= 300, value


def test_sections_that_need_options(store):
    fill(store)
    out = store.folder / "page.html"
    store.call("report", "--html", out)
    parsed = Page(out.read_text())
    assert set(parsed.texts["h2"]) == SECTIONS - {"Retention", "Cost", "Projection"}


def test_odd_stores(store):
    out = store.folder / "page.html"
    run("save", store.path, "--run", "a", "--step", 1, "--parent", "x@1", store.file({}), expect=3)
    store.call("report", "-q", "--html", out, "--until", 5)
    assert "svg" not in Page(out.read_text()).tags
    store.save(1, {})
    store.call("report", "-q", "--html", out, "--until", 5)
    assert "Share of a full copy" not in out.read_text(), "no element, no share"
    store.save(2, {"e": np.zeros(0, np.float32), "s": np.array(1)})
    store.call("report", "-q", "--html", out)
    assert "Share of a full copy" in Page(out.read_text()).texts["figcaption"]
    assert "Bytes written" in out.read_text()
    (store.path / "catalog.db").unlink()
    store.call("rebuild", "-q")
    store.call("report", "-q", "--html", out)
    assert "Time of saves" not in out.read_text() and "Bytes written" not in out.read_text(), "a new catalog does not know"


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 210 checkpoints and 45 runs of one. Uses memory if possible: each save on a disk takes several syncs."""
    from support_cli import Store
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        store = Store(Path(folder))
        path = store.file({"layers.2.w": np.ones(4, np.float32), "layers.10.w": np.ones(4, np.float32)})
        for i in range(255):
            name = f"long@{i}" if i < 210 else f"short{i - 210:02}@1000"
            run("save", store.path, name, "--codec", "raw", "--base", "--metric", "loss=2", path, "-q")
        yield store


def test_many_checkpoints_and_runs(many):
    """Checkpoints share points; six runs have curves, forty have lanes."""
    out = many.folder / "page.html"
    many.call("report", "-q", "--html", out)
    text = out.read_text()
    assert "A dot is the mean of up to 4 checkpoints." in text and "The 6 runs with most checkpoints, of 46." in text
    assert "The last 50 of 255; report --csv has all." in text and "40 of 210 checkpoints." in text
    assert "The first 40 of 46 runs." in text
    for caption in ("Share of a full copy", "Bytes written", "loss"):
        shown = [t.split("@")[0] for t in tooltips(text, caption)]
        assert shown == ["long"] * 60 + [f"short0{i}" for i in range(5)], caption
    rows = tooltips(text, "Bits by layer: long")
    assert len(rows) == 80 and rows[0].startswith("layers.2, ") and rows[-1].startswith("layers.10, "), "in natural order"
    assert text.count("Bits by layer: ") == 1, "a single checkpoint has no map beside others"
    lanes = [t.split("@")[0] for t in tooltips(text, "Lineage")]
    assert lanes.count("long") == 42 and len(set(lanes)) == 40, "1000 steps have 200 places"
    assert len(text) < 250_000


def test_a_picture_of_many_saves(many):
    """The last 200 are drawn."""
    out = many.folder / "saves.svg"
    many.call("timeline", "--svg", out)
    text = out.read_text()
    named = set(re.findall(r"<title>([\w@]+), ", text))
    assert named == {f"long@{i}" for i in range(55, 210)} | {f"short{i:02}@1000" for i in range(45)}
    assert "the last 200 of 255" in text and len(text) < 400_000
    for x, width in re.findall(r'<rect[^>]* x="([0-9.]+)"[^>]* width="([0-9.]+)"', text):
        assert float(x) + float(width) <= 960.1


def test_it_replaces_only_reports(store):
    store.save(1, state(1))
    out = store.folder / "page.html"
    store.call("report", "-q", "--html", out)
    first = out.read_text()
    store.save(2, state(1, 2))
    store.call("report", "-q", "--html", out)
    assert out.read_text() != first
    for make in (lambda: out.write_text("<!doctype html>\n<p>mine"), out.mkdir, lambda: out.symlink_to(store.path)):
        out.rmdir() if out.is_dir() and not out.is_symlink() else out.unlink()
        make()
        said = store.call("report", "--html", out, expect=FAILED).err
        assert "exists" in said
    assert not store.temporary_files()
    assert store.call("report", "-q", "--json", "--html", store.folder / "other.html").json()["checkpoints"] == 2


@pytest.mark.skipif(not BROWSER, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.skipif(bool(os.environ.get("CKPTDELTA_SAN")), reason="a browser finds no more under sanitizers")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser(page, tmp_path, width, dark):
    assert page[0].count("<td") > 100
    check_in_browser(page[0], tmp_path, width, dark)
