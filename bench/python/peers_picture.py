"""What README shows of bench_peers: a picture of bytes and waits, and a table.

    peers_picture.py [RESULT]... [--svg FILE]

Prints the table as Markdown. Writes the picture with --svg. RESULT is what bench_peers.py wrote, by default
bench/results/bench_peers.json; later ones add methods that earlier ones lack.
"""

import argparse
import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = [ROOT / "bench/results/bench_peers.json"]
SHOWN = {  # method of bench_peers: its name here
    "torch.save": "torch.save", "torch.save, zstd": "torch.save, then zstd -3", "zipnn": "ZipNN", "dcp": "DCP",
    "dcp async thread": "DCP, async",
    "ours, Session": "ckptdelta, exact", "ours, Session near": "ckptdelta, near", "ours, Session coarse": "ckptdelta, coarse",
}
WIDTH, ROW, TOP, NAMES, GAP, LABEL = 880, 30, 62, 190, 30, 84
STYLE = (".paper{fill:#fff}text{font:14px sans-serif;fill:#1b1f24}.head{font-weight:600}.soft{fill:#57606a}.peer{fill:#9aa4b0}.ours{fill:#1d5fd6}"
         "@media(prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#e6e9ee}.soft{fill:#a3abb5}.peer{fill:#6b7480}.ours{fill:#7ab0ff}}")


def read(paths):
    """Returns the size of a state, and the rows to show: (name, figures)."""
    results = [json.loads(Path(path).read_text()) for path in paths]
    assert len({r["state_bytes"] for r in results}) == 1, "the results are of different models"
    methods = {}
    for result in reversed(results):
        methods |= result["methods"]
    return results[0]["state_bytes"], [(name, methods[key]) for key, name in SHOWN.items() if key in methods]


def size(count):
    return f"{count / 1e6:.1f} MB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def seconds(value):
    return f"{value:.2f} s"


def table(state, rows):
    out = [f"| a state of {size(state)} | a save | ratio | training waits | whole loop | durable after | load | memory |",
           "|---|---|---|---|---|---|---|---|"]
    for name, r in rows:
        ratio = state / r["save_bytes"]
        out.append(f"| {name} | {size(r['save_bytes'])} | {ratio:.{0 if ratio >= 10 else 2}f}x | {seconds(r['waits_s'])} | +{seconds(r['slower_s'])} "
                   f"| {seconds(r['durable_s'])} | {seconds(r['load_s'])} | {r['memory_states']:.1f}x |")
    return "\n".join(out) + "\n"


def bars(rows, key, x, width, text):
    """One bar a row, on a linear scale from zero."""
    most = max(r[key] for _, r in rows)
    out = []
    for i, (name, r) in enumerate(rows):
        y, length = TOP + i * ROW, max(1.0, r[key] / most * (width - LABEL))
        out.append(f'<rect class="{"ours" if name.startswith("ckptdelta") else "peer"}" x="{x}" y="{y}" width="{length:.1f}" height="{ROW - 10}" rx="3"/>')
        out.append(f'<text x="{x + length + 6:.1f}" y="{y + 15}">{escape(text(r[key]))}</text>')
    return out


def picture(state, rows):
    height = TOP + len(rows) * ROW + 8
    width = (WIDTH - NAMES - GAP) / 2
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Bytes of a save, and how long training waits">',
           f"<style>{STYLE}</style>", f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
           f'<text class="soft" x="8" y="22">One save of a GPT with AdamW moments, {size(state)} of fp32 values</text>',
           f'<text class="head" x="{NAMES}" y="48">bytes written</text>', f'<text class="head" x="{NAMES + width + GAP}" y="48">training waits</text>']
    for i, (name, _) in enumerate(rows):
        out.append(f'<text x="{NAMES - 10}" y="{TOP + i * ROW + 15}" text-anchor="end">{escape(name)}</text>')
    out += bars(rows, "save_bytes", NAMES, width, size) + bars(rows, "waits_s", NAMES + width + GAP, width, seconds)
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", default=RESULTS, metavar="RESULT")
    parser.add_argument("--svg", metavar="FILE")
    args = parser.parse_args()
    state, rows = read(args.results)
    print(table(state, rows), end="")
    if args.svg:
        Path(args.svg).write_text(picture(state, rows))


if __name__ == "__main__":
    main()
