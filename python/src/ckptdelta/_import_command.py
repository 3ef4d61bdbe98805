"""`python -m ckptdelta import STORE PATH`: checkpoints of PyTorch and its neighbours, from the command line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ._call import Progress
from ._errors import Error, InvalidError
from ._foreign import find_all, step_of
from ._store import open as open_store

TEXT = """Save checkpoints that other libraries wrote as steps of a run: files of torch.save() (.pt, .pth, .bin, .ckpt of Lightning) and of
safetensors, folders of transformers and its Trainer, of DeepSpeed, of Megatron and of torch.distributed.checkpoint, and folders with several of
these. Other files of ranks need --layout; see `ckptdelta import --help`."""
EXAMPLES = """examples:
  python -m ckptdelta import ckpts --run gpt output/                 all checkpoint-N folders of a Trainer, the oldest first
  python -m ckptdelta import ckpts --run gpt --step 1000 model.pt    one file, as step 1000"""

STATUS = {"NOT_FOUND": 3, "CORRUPT": 4, "UNSUPPORTED": 4}


def is_wanted(arguments: Sequence[str]) -> bool:
    """Is this an import without a layout? The command itself does those with one."""
    return arguments[:1] == ["import"] and not any(a == "--layout" or a.startswith("--layout=") for a in arguments)


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status, which is that of the command: docs/cli.md lists them."""
    parser = argparse.ArgumentParser(prog="ckptdelta import", description=TEXT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="[STORE] PATH", nargs="+", help="the store, created if it does not exist [default: CKPTDELTA_STORE]; what to import")
    parser.add_argument("-r", "--run", required=True, help="the run that they become steps of")
    parser.add_argument("--step", type=int, metavar="N", help="of a single checkpoint [default: the one it records, else the last number in its name]")
    parser.add_argument("--fidelity", choices=("exact", "near", "coarse"), default="exact", help="[default: exact]")
    parser.add_argument("--pickle", action="store_true", help="restore what only pickle can restore: this runs code from the files")
    parser.add_argument("-n", "--dry-run", action="store_true", help="save nothing; show what would be saved")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("-v", "--verbose", action="store_true", help="print more")
    args = parser.parse_args(arguments)
    store = os.environ.get("CKPTDELTA_STORE")
    if not store or (Path(args.paths[0]) / "data" / "store").exists():
        store, args.paths = args.paths[0], args.paths[1:]
    if not args.paths:
        parser.error("name the STORE, a directory, or set CKPTDELTA_STORE to it, and what to import")
    logging.basicConfig(format="%(message)s", level=logging.ERROR if args.quiet else logging.INFO if args.verbose else logging.WARNING)
    try:
        done = _plan(args) if args.dry_run else _import(args, store)
    except (Error, OSError) as error:
        print(f"ckptdelta: {error}", file=sys.stderr)
        return STATUS.get(getattr(error, "status", ""), 1)
    except KeyboardInterrupt:
        print("ckptdelta: interrupted; what was saved stays, and the same command continues", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, "checkpoints": done}))
    return 0


def _plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    done = []
    for path in args.paths:
        found, several = find_all(path)
        if several and args.step is not None:
            raise InvalidError(f"{path} has {len(found)} checkpoints: --step is for a single one")
        for one in found:
            step = step_of(one.read(args.pickle), one) if args.step is None else args.step
            if step is None:
                continue
            done.append({"path": str(one.path), "form": one.form, "run": args.run, "step": step})
            if not args.json and not args.quiet:
                print(f"{one.path} ({one.form}) -> {args.run}@{step}")
    return done


def _import(args: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    done = []
    with open_store(path) as store:
        for source in args.paths:
            with _Bar(not (args.quiet or args.json)) as progress:
                saved = store.import_checkpoints(source, run=args.run, step=args.step, fidelity=args.fidelity, pickle=args.pickle, progress=progress)
            done += [asdict(one) for one in saved]
            for one in saved if not args.json and not args.quiet else ():
                print(f"{one}: {one.kind}, {_size(one.raw_bytes)} stored as {_size(one.stored_bytes)}")
            if not saved and not args.json and not args.quiet:
                print(f"{source}: the run has all its steps already")
    return done


class _Bar:
    """Progress on a terminal, by tqdm if it is there."""

    def __init__(self, wanted: bool) -> None:
        self.bar: Any = None
        self.wanted = wanted and sys.stderr.isatty()

    def __enter__(self) -> Progress | None:
        if not self.wanted:
            return None
        try:
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return None
        self.bar = tqdm(unit="B", unit_scale=True, leave=False)
        return self._report

    def _report(self, done: int, total: int) -> None:
        if self.bar.total != total or done < self.bar.n:
            self.bar.reset(total=total)
        self.bar.update(done - self.bar.n)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _size(count: int) -> str:
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
