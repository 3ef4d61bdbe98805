"""report --html: one page without other files, with any names, in light and dark, on narrow and wide
screens."""

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser

import numpy as np
import pytest

from support_cli import DOC, FAILED, run, state, store  # noqa: F401

HOSTILE = "a<b>&\"c'<script>alert(1)</script>\n"
VOID = {"meta", "br", "hr", "img", "input", "link"}
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "div", "dt", "dd", "figure", "figcaption", "small",
        "span", "svg", "line", "path", "ul", "li", "i", "table", "thead", "tbody", "tr", "th", "td"}
SECTIONS = {"Runs", "Roles", "Growth", "Fidelities", "Time", "Retention", "Cost", "The end of the run", "Tensors", "Checkpoints"}


class Page(HTMLParser):
    """Asserts that all elements are closed, and keeps the texts of each kind of element."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.attributes = [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        assert len({name for name, _ in attributes}) == len(attributes)
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def fill(store):
    """Two runs, lossy and exact, and a tensor whose name is markup."""
    for step in range(10, 100, 10):
        tensors = {**state(1, step), HOSTILE: np.full(100, step, np.float32)}
        store.save(step, tensors, *(["--fidelity", "near"] if step > 50 else []), run_name="gpt")
    branch = "gpt~2-" + "long-name-of-a-branch-" * 5
    store.save(55, state(1, 55), "--parent", "gpt@50", "-q", run_name=branch)
    store.save(75, state(1, 75), run_name=branch)
    store.save(85, state(1, 75), "--base", run_name=branch)


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
    assert parsed.tags.count("svg") == parsed.tags.count("figure") == 5
    assert parsed.tags.count("h1") == 1 and ("html", "lang", "en") in parsed.attributes
    captions = set(parsed.texts["figcaption"])
    assert captions == {"Size of each checkpoint", "All checkpoints so far", "Bits for each element", "Time of saves", "Lineage"}
    cells = parsed.texts["td"]
    assert html.unescape(HOSTILE).replace("\n", "\\x0a") in cells, "the name is there as it is"
    report = store.json("report")
    for row in report["by_run"]:
        assert row["run"] in cells and row["run"] in parsed.texts["span"]
    titles = parsed.texts["title"]
    assert sum(title.split(",")[0] in {f"{c['run']}@{c['step']}" for c in report["by_checkpoint"]} for title in titles) == 24
    assert any("<i>&cheap\"', 2026-02-03" in line for line in parsed.texts["p"])
    assert any(line.startswith(str(store.path)) for line in parsed.texts["p"])


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
    assert boxes == ["0 0 1000 300"] * 4 + ["0 0 1000 88"]
    for _, name, value in parsed.attributes:
        if name == "d":
            assert re.fullmatch(r"([MLHh](-?[0-9.]+)( -?[0-9.]+)?)+", value), value
            for x, y in re.findall(r"[ML](-?[0-9.]+) (-?[0-9.]+)", value):
                assert 0 <= float(x) <= 1000 and 0 <= float(y) <= 300, value


def test_sections_that_need_options(store):
    fill(store)
    out = store.folder / "page.html"
    store.call("report", "--html", out)
    parsed = Page(out.read_text())
    assert set(parsed.texts["h2"]) == SECTIONS - {"Retention", "Cost", "The end of the run"}
    assert "A month costs" not in parsed.texts["dt"]


def test_odd_stores(store):
    out = store.folder / "page.html"
    run("save", store.path, "--run", "a", "--step", 1, "--parent", "x@1", store.file({}), expect=3)
    store.call("report", "-q", "--html", out, "--until", 5)
    assert "svg" not in Page(out.read_text()).tags
    store.save(1, {})
    store.call("report", "-q", "--html", out, "--until", 5)
    assert Page(out.read_text()).tags.count("svg") == 4, "no element, no bits"
    store.save(2, {"e": np.zeros(0, np.float32), "s": np.array(1)})
    store.call("report", "-q", "--html", out)
    assert Page(out.read_text()).tags.count("svg") == 5
    (store.path / "catalog.db").unlink()
    store.call("rebuild", "-q")
    store.call("report", "-q", "--html", out)
    assert "Time of saves" not in out.read_text(), "a new catalog does not know"


def test_many_checkpoints_share_points(store):
    """Uses memory if possible: 210 saves on a disk take 210 times as many syncs."""
    path = store.file({"w": np.ones(4, np.float32)})
    out = store.folder / "page.html"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else store.folder) as folder:
        for step in range(210):
            run("save", f"{folder}/store", "--run", "a", "--step", step, "--codec", "raw", "--base", path, "-q")
        run("report", f"{folder}/store", "-q", "--html", out)
    text = out.read_text()
    parsed = Page(text)
    assert "Each place stands for about 1 checkpoints." in text
    assert "The last 50 of 210; report --csv has all." in text
    dots = [v for _, name, v in parsed.attributes if name == "class" and v.startswith("dot")]
    assert 200 <= len(dots) <= 200 + 201


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


# ----------------------------------------------------------------------------------------------------- a browser

MEASURE = """
<script>
function rgb(text) { const n = text.match(/[0-9.]+/g).map(Number); return n.length > 3 && n[3] === 0 ? null : n.slice(0, 3); }
function light(c) { return c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                           .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0); }
function behind(e) { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c) return c; }
                     return null; }
const said = {width: innerWidth, scroll: document.documentElement.scrollWidth, dark: matchMedia('(prefers-color-scheme:dark)').matches,
              texts: 0, contrast: 99, worst: '', font: 99, outside: []};
for (const e of document.querySelectorAll('body *:not(script):not(svg *)')) {
  const box = e.getBoundingClientRect();
  if (box.right > innerWidth + 1 && !e.closest('.wide')) said.outside.push(e.tagName + ' ' + e.className);
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
  const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), font = parseFloat(getComputedStyle(e).fontSize);
  said.texts++;
  if (contrast < said.contrast) { said.contrast = contrast; said.worst = e.outerHTML.slice(0, 200); }
  if (font < said.font) said.font = font;
}
said.lines = [...document.querySelectorAll('.curve, .dot, .link')].map(e => {
  const a = light(rgb(getComputedStyle(e).stroke)), b = light(behind(e.closest('figure')));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }).reduce((x, y) => Math.min(x, y), 99);
parent.document.body.setAttribute('data-said', JSON.stringify(said));
</script>
"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)


@pytest.mark.skipif(not BROWSER, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.skipif(bool(os.environ.get("CKPTDELTA_SAN")), reason="a browser finds no more under sanitizers")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser(page, tmp_path, width, dark):
    path = tmp_path / "frame.html"  # a window cannot be so narrow
    inside = html.escape(page[0].replace("</body>", MEASURE + "</body>"))
    path.write_text(f'<!doctype html><meta charset="utf-8"><iframe style="width:{width}px;height:900px;border:0" srcdoc="{inside}"></iframe>',
                    encoding="utf-8")
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
                           "--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                           "--dump-dom", path.as_uri()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=120)
    found = re.search(r'data-said="([^"]*)"', done.stdout)
    assert done.returncode == 0 and found, done.stderr[-1000:]
    said = json.loads(html.unescape(found[1]))
    assert said["width"] == width and said["dark"] == dark and said["texts"] > 100
    assert said["scroll"] <= width and said["outside"] == [], said
    assert said["contrast"] >= 4.5, said["worst"]
    assert said["lines"] >= 3 and said["font"] >= 11
