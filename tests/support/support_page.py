"""Reads the page of `report --html`."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "div", "dt", "dd", "figure", "figcaption", "small",
        "span", "svg", "g", "line", "path", "rect", "ul", "ol", "li", "i", "b", "table", "thead", "tbody", "tr", "th", "td"}


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


def tooltips(text, caption):
    """Those of one figure, in order."""
    figure, = (part for part in text.split("<figure")[1:] if f"<figcaption>{html.escape(caption)}<small>" in part)
    return [html.unescape(t) for t in re.findall(r"<title>(.*?)</title>", figure)]


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
said.lines = [...document.querySelectorAll('.curve, .dot, .link, .bar, .thin, .again, .save')].map(e => {
  const a = light(rgb(getComputedStyle(e).stroke)), b = light(behind(e.closest('figure')));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }).reduce((x, y) => Math.min(x, y), 99);
parent.document.body.setAttribute('data-said', JSON.stringify(said));
</script>
"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)


def check_in_browser(text, folder, width, dark):
    """Asserts that a page is legible, and as wide as its window."""
    path = folder / "frame.html"  # a window cannot be so narrow
    inside = html.escape(text.replace("</body>", MEASURE + "</body>"))
    path.write_text(f'<!doctype html><meta charset="utf-8"><iframe style="width:{width}px;height:900px;border:0" srcdoc="{inside}"></iframe>',
                    encoding="utf-8")
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
                           "--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                           "--dump-dom", path.as_uri()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=120)
    found = re.search(r'data-said="([^"]*)"', done.stdout)
    assert done.returncode == 0 and found, done.stderr[-1000:]
    said = json.loads(html.unescape(found[1]))
    assert said["width"] == width and said["dark"] == dark and said["texts"] > 20
    assert said["scroll"] <= width and said["outside"] == [], said
    assert said["contrast"] >= 4.5, said["worst"]
    assert said["lines"] >= 3 and said["font"] >= 11
