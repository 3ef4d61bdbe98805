"""Checks who includes and calls whom, how long files and functions are, and how many parameters functions have: check_layers.py [ROOT] [--objects FOLDER] [--graph]

    cli -> supervise
    cli, supervise, python, mpi, examples, bench -> agent -> engine -> kernels, codec, catalog, objects -> base
                                                     agent -> peers -> base

Folders of engine/, codec/ and cli/ are rooms. ROOMS says which rooms a room may use; the order has no circle. A room shows
the others one header, which bears its name; its other headers are private. supervise/ is a room by itself.
So are agent/, which nobody includes and which uses some rooms of engine/, and peers/, which agent/ uses. Tests and benchmarks may include all. With the
folder of the objects, calls are checked by their symbols as well: a header that is included from above, or a declaration that stands elsewhere, hides nothing. --graph prints the rooms.
The symbols also show circles of files inside a room, files that call each other in a ring; small ones are allowed (MAX_CIRCLE_FILES).

Benchmarks may also include what the public header does not show, except the catalog's.


Reads sources as text, comments and string contents removed; functions are found by the layout that clang-format gives
them (a definition ends its head with `{` outside any other braces, and its closing brace stands in the first column).
Prints `file:line: what is wrong` for each finding and exits 1 if there is any. `tests/tools/check_layers_selftest.sh` proves
that each rule finds what it is for. Needs the standard library only.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

LIBRARY = {"include", "base", "objects", "codec", "catalog", "kernels", "engine", "peers", "agent"}
USERS = {"cli", "supervise", "python", "mpi", "examples", "bench"}
# Folders that are one room.
SINGLE_ROOMS = {"supervise", "objects", "peers"}
FREE = {"tests"}

# The folders of ours from which each folder may include. The public header's types are everybody's.
MAY_INCLUDE = {
    "include": {"include"},
    "base": {"base"},
    "objects": {"objects", "base"},
    "codec": {"codec", "base"},
    "catalog": {"catalog", "base"},
    "kernels": {"kernels", "base"},
    "engine": {"engine", "include", "kernels", "codec", "catalog", "objects", "base"},
    "peers": {"peers", "include", "base"},
    "agent": {"agent", "peers", "engine", "codec", "include", "base"},
    **{user: {user} for user in USERS},
    "cli": {"cli", "supervise"},
    # Benchmarks also time the library's inner operations, which the public header does not show.
    "bench": {"bench", "include", "engine", "kernels", "codec", "base"},
}
PUBLIC_HEADER = {"ckptdelta.h", "include/ckptdelta.h"}
# Which rooms of its own folder a room may use. Files of engine/ itself wire rooms together and may use all of them.
ROOMS = {
    "engine": {
        "common": set(),
        "store": {"common"},
        "decode": {"store", "common"},
        "device": {"decode", "store", "common"},
        "lossy": {"device", "decode", "store", "common"},
        "encode": {"lossy", "device", "decode", "store", "common"},
        "save": {"encode", "lossy", "device", "decode", "store", "common"},
        "load": {"device", "decode", "store", "common"},
        "ranks": {"save", "load", "device", "decode", "store", "common"},
        "integrity": {"decode", "store", "common"},
        "retain": {"integrity", "store", "common"},
        "compact": {"retain", "encode", "decode", "store", "common"},
        "transfer": {"retain", "integrity", "decode", "store", "common"},
        "follow": {"retain", "load", "store", "common"},
        "slots": {"ranks", "save", "load", "store", "common"},
        "session": {"slots", "ranks", "save", "load", "device", "store", "common"},
    },
    "codec": {
        "common": set(),
        "entropy": {"common"},
        "lattice": {"entropy", "common"},
        "chunk": {"common"},
        "metadata": {"common"},
        "parity": {"metadata", "common"},
    },
    "cli": {
        "output": set(),
        "files": {"output"},
        "layout": {"files", "output"},
        "convert": {"layout", "files", "output"},
        "report": {"files", "output"},
        "commands": {"convert", "report", "layout", "files", "output"},
    },
}
# Which rooms of other folders a folder may use that is one room itself.
SINGLE_USES = {"agent": {("engine", "slots"), ("engine", "ranks"), ("engine", "common"), ("codec", "common")}}
# A mapped file that shrinks kills the process. What this file maps cannot shrink.
MAPS_MEMORY = "base/shared_memory.c"
GENERATED = {"catalog_schema.h": "catalog"}

# Foreign headers, and the only folders that may include them. Benchmarks compare with other coders.
OWNERS = [
    (r"sqlite3(ext)?\.h", {"catalog"}),
    (r"(zstd.*|zdict|lz4.*)\.h", {"codec", "bench"}),
    (r"xxh(ash|3|_.*)\.h", {"base"}),
    (r"(cuda.*|cublas.*|cooperative_groups.*|cub/.*|thrust/.*|nvrtc.*|nvml.*)", {"kernels/cuda"}),
    (r"jansson.*\.h", {"cli", "supervise", "objects/s3"}),
    (r"(curl/.*|expat.*|openssl/.*)", {"objects/s3"}),
    (r"argp\.h", {"cli", "examples", "bench"}),
    (r"mpi\.h", {"mpi", "examples"}),
    (r"uc[mpst]/.*", {"peers"}),
]

FILE_CALLS = """open open64 openat openat2 creat fopen fdopen freopen mkstemp mkostemp tmpfile opendir fdopendir scandir
    rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat remove mkdir mkdirat rmdir
    fsync fdatasync sync syncfs sync_file_range fallocate posix_fallocate ftruncate truncate copy_file_range
    pread pwrite preadv pwritev flock fcntl lockf""".split()
NEVER_CALLS = """mmap mmap64 mremap exit _exit _Exit quick_exit abort assert printf fprintf vprintf vfprintf puts fputs
    putchar putc fputc perror fwrite signal sigaction setlocale system popen fork""".split()

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CIRCLE_FILES = 5
MAX_PARAMETERS = 6
MEASURED = LIBRARY | {"cli", "supervise", "examples"}
SHORT = MEASURED | {"bench"}

SUFFIXES = {".c", ".h", ".cu", ".cuh", ".cpp", ".hpp", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
FUNCTION = re.compile(r"^(?!typedef|#|\s)[\w *]*?\b(?![A-Z_]+\(|__attribute__)(\w+)\(([^;{}]*?)\)\s*\{", re.MULTILINE)
ATTRIBUTE = re.compile(r"__attribute__\(\((?:[^()]|\([^()]*\))*\)\)|\b[A-Z_]*PRINTF\([^()]*\)")
TOKEN = re.compile(r"""//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)


def call_pattern(names):
    """A call by name: not a longer name, not a member of a struct."""
    return re.compile(r"(?<![\w.>])(?:" + "|".join(names) + r")\s*\(")


FILE_CALL = call_pattern(FILE_CALLS)
NEVER_CALL = call_pattern(NEVER_CALLS)


def strip_comments(text):
    """The text without comments and string contents; lines keep their numbers, includes their names."""
    def blank(match):
        token = match.group(0)
        newlines = "\n" * token.count("\n")
        if token[0] == "/":
            return " " + newlines
        line_start = text.rfind("\n", 0, match.start()) + 1
        if re.match(r"\s*#\s*include\b", text[line_start:match.start()] + " "):
            return token
        return token[0] + newlines + token[0]
    return TOKEN.sub(blank, text)


class Source:
    def __init__(self, root, path):
        self.path = path.relative_to(root)
        self.folder = self.path.parts[0]
        raw = path.read_text(encoding="utf-8", errors="replace")
        self.length = len(raw.splitlines())
        self.lines = strip_comments(raw).splitlines()
        self.findings = []

    def find(self, number, message):
        self.findings.append(f"{self.path}:{number}: {message}")

    def exists_beside(self, root, name):
        return (root / self.path.parent / name).is_file()


def check_includes(source, root):
    for number, line in enumerate(source.lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, name = match.groups()
        owner = owner_of(source, root, kind, name)
        if owner is not None:
            if owner not in MAY_INCLUDE[source.folder]:
                source.find(number, f"{source.folder}/ must not include {name}, which is part of {owner}/")
            continue
        if name in PUBLIC_HEADER:
            if source.folder in USERS and name != "ckptdelta.h":
                source.find(number, 'include it as "ckptdelta.h" here')
            continue
        check_foreign(source, number, name)


def room_of(path):
    """(folder, room) of a file in a room, else None."""
    parts = Path(path).parts
    return parts[:2] if len(parts) == 3 and parts[0] in ROOMS else None


def room_header(room):
    """The one header of a room that other rooms may include."""
    return f"{room[0]}/{room[1]}/{room[1]}.h"


def may_use(user, used):
    """May a room use another one of its folder? What belongs to no room, or to another folder, is no matter of rooms."""
    if not user or not used or user[0] != used[0] or user == used:
        return True
    return used[1] in ROOMS[user[0]].get(user[1], ())


def check_rooms(source):
    own = room_of(source.path)
    if source.folder in ROOMS and len(source.path.parts) == 3 and own[1] not in ROOMS[source.folder]:
        source.find(1, f"{source.folder}/{own[1]} is no room: scripts/check_layers.py has the list")
    for number, line in enumerate(source.lines, 1):
        match = INCLUDE.match(line)
        other = room_of(match.group(2)) if match else None
        single = match.group(2).split("/")[0] if match else None
        if single in SINGLE_ROOMS - {source.folder} and source.folder in MEASURED and match.group(2) != f"{single}/{single}.h":
            source.find(number, f"{match.group(2)} is private: other rooms include {single}/{single}.h")
        if other and other not in SINGLE_USES.get(source.folder, {other}):
            source.find(number, f"{source.folder} must not use {'/'.join(other)}: {match.group(2)}")
        elif not may_use(own, other):
            source.find(number, f"{own[0]}/{own[1]} must not use {'/'.join(other)}: {match.group(2)}")
        elif other and other != own and source.folder in MEASURED and match.group(2) != room_header(other):
            source.find(number, f"{match.group(2)} is private: other rooms include {room_header(other)}")


def check_circles():
    """The order of the rooms is one: each may only use what comes before it in some order."""
    findings = []
    for folder, rooms in ROOMS.items():
        done = set()
        while True:
            ready = {r for r in rooms if r not in done and rooms[r] <= done}
            if not ready:
                break
            done |= ready
        if done != set(rooms):
            findings.append(f"scripts/check_layers.py:1: rooms of {folder}/ use each other in a circle: {' '.join(sorted(set(rooms) - done))}")
    return findings


def symbols(objects, sources):
    """({symbol: object}, {object: [symbols that it wants]}), objects by their source's path without suffix. Objects of sources that are gone are left out."""
    defined, wanted = {}, {}
    for path in sorted(objects.rglob("*.o")):
        name = path.relative_to(objects).with_suffix("")
        if name.parts[0] not in ROOMS or f"{name}.c" not in sources:
            continue
        wanted[name] = []
        for line in subprocess.run(["nm", str(path)], check=True, capture_output=True, text=True).stdout.splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[1] in "TDBRV":
                defined[fields[2]] = name
            elif len(fields) == 2 and fields[0] == "U":
                wanted[name].append(fields[1])
    return defined, wanted


def check_symbols(defined, wanted):
    """(findings, how many calls go from room to room)."""
    findings, edges = [], {}
    for user, names in wanted.items():
        for name in names:
            owner = defined.get(name)
            own, other = room_of(f"{user}.c"), room_of(f"{owner}.c") if owner else None
            if not own or not other or own == other:
                continue
            edges[own, other] = edges.get((own, other), 0) + 1
            if not may_use(own, other):
                findings.append(f"{user}.c:1: {own[0]}/{own[1]} must not call {name}, which is part of {other[0]}/{other[1]} ({owner.name}.c)")
    return findings, edges


def calls_within_rooms(defined, wanted):
    """{file: {file of the same room that it calls: one symbol of it}}."""
    calls = {}
    for user, names in wanted.items():
        for name in names:
            owner = defined.get(name)
            if owner and owner != user and room_of(f"{user}.c") and owner.parent == user.parent:
                calls.setdefault(user, {}).setdefault(owner, name)
    return calls


def reached(calls, start):
    """All files that the calls of `start` lead to."""
    found, waiting = set(), [start]
    while waiting:
        for file in calls.get(waiting.pop(), ()):
            if file not in found:
                found.add(file)
                waiting.append(file)
    return found


def check_file_circles(defined, wanted):
    calls = calls_within_rooms(defined, wanted)
    reach = {file: reached(calls, file) for file in sorted(calls)}
    findings, seen = [], set()
    for file, others in reach.items():
        circle = sorted(other for other in others if file in reach.get(other, ()))
        if file in seen or len(circle) <= MAX_CIRCLE_FILES:
            continue
        seen.update(circle)
        edges = [f"{a.name} calls {calls[a][b]} of {b.name}" for a in circle for b in circle if b in calls[a]]
        findings.append(f"{circle[0]}.c:1: {len(circle)} files of {circle[0].parent} call each other in a circle, {MAX_CIRCLE_FILES} are the limit: "
                        f"{' '.join(c.name for c in circle)} ({', '.join(edges)})")
    return findings


def print_graph(paths, root, edges):
    for folder, rooms in ROOMS.items():
        for room in rooms:
            files = [p for p in paths if p.relative_to(root).parts[:2] == (folder, room)]
            lines = sum(len(p.read_text(errors="replace").splitlines()) for p in files)
            used = sorted((other[1], n) for (own, other), n in edges.items() if own == (folder, room) and other[0] == folder)
            print(f"{folder + '/' + room:20} {len(files):4} files {lines:6} lines  -> {', '.join(f'{r} {n}' for r, n in used)}")


def owner_of(source, root, kind, name):
    """The folder of ours that a header belongs to; None for the public header and foreign ones."""
    if name in PUBLIC_HEADER:
        return None
    if name in GENERATED:
        return GENERATED[name]
    if kind == '"' and source.exists_beside(root, name):
        target = (root / source.path.parent / name).resolve().relative_to(root.resolve())
        return None if str(target) in PUBLIC_HEADER else target.parts[0]
    first = name.split("/")[0]
    if "/" in name and first in LIBRARY | USERS | FREE:
        return first
    # A bare name finds the public headers, because their folder is on the include path.
    return "include" if (root / "include" / name).is_file() else None


def check_foreign(source, number, name):
    for pattern, allowed in OWNERS:
        inside = any(str(source.path).startswith(folder + "/") for folder in allowed)
        if re.fullmatch(pattern, name) and not inside:
            source.find(number, f"{name} belongs in {' and '.join(sorted(allowed))} only")


def check_calls(source):
    if source.folder not in LIBRARY:
        return
    for number, line in enumerate(source.lines, 1):
        if line.lstrip().startswith("#") and "define" not in line:
            continue
        if source.folder != "base":
            for match in FILE_CALL.finditer(line):
                source.find(number, f"{match.group(0)}) is base/'s business: call base/file.h")
        for match in NEVER_CALL.finditer(line):
            if match.group(0).startswith("mmap") and str(source.path) == MAPS_MEMORY:
                continue
            source.find(number, f"the library never calls {match.group(0)})")


def check_parameters(source):
    """Definitions only: a declaration has as many."""
    if source.folder not in MEASURED - {"examples"}:
        return
    text = ATTRIBUTE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), "\n".join(source.lines))
    for match in FUNCTION.finditer(text):
        depth, count = 0, 1
        for c in match.group(2):
            depth += (c == "(") - (c == ")")
            count += c == "," and depth == 0
        if count > MAX_PARAMETERS:
            number = text.count("\n", 0, match.start()) + 1
            source.find(number, f"{match.group(1)} has {count} parameters, {MAX_PARAMETERS} are the limit")


def check_lengths(source):
    if source.folder not in SHORT:
        return
    if source.length > MAX_FILE_LINES:
        source.find(source.length, f"{source.length} lines, {MAX_FILE_LINES} are the limit")
    start = None
    for number, line in enumerate(source.lines, 1):
        line = line.rstrip()
        if start is None:
            if line == "{" or (re.search(r"\)\s*(const\s*|noexcept\s*)?\{$", line) and not line.startswith("}")):
                start = number
        elif line.startswith("}"):
            length = number - start + 1
            if length > MAX_FUNCTION_LINES:
                source.find(start, f"a function of {length} lines, {MAX_FUNCTION_LINES} are the limit")
            start = None
    if start is not None:
        source.find(start, "no closing brace in the first column: is the file formatted (make format)?")


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("root", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--objects", type=Path, help="where the objects of these sources are")
    parser.add_argument("--graph", action="store_true", help="print rooms, their size, and the calls between them")
    args = parser.parse_args(argv[1:])
    root = args.root
    folders = sorted(LIBRARY | USERS)
    paths = [p for f in folders for p in sorted((root / f).rglob("*")) if p.suffix in SUFFIXES and p.is_file()]
    if not any(p.relative_to(root).parts[0] in LIBRARY for p in paths):
        print(f"check_layers: no library sources under {root}")
        return 1
    findings, edges = check_circles(), {}
    for path in paths:
        source = Source(root, path)
        check_includes(source, root)
        check_calls(source)
        check_lengths(source)
        check_parameters(source)
        check_rooms(source)
        findings += source.findings
    if args.objects:
        defined, wanted = symbols(args.objects, {p.relative_to(root).as_posix() for p in paths})
        called, edges = check_symbols(defined, wanted)
        findings += called + check_file_circles(defined, wanted)
    if args.graph:
        print_graph(paths, root, edges)
    print("\n".join(findings) if findings else f"check_layers: {len(paths)} files, no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
