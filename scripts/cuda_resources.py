"""What each kernel takes of a device, from what ptxas said when it was compiled: cuda_resources.py LOG... [--check FILE]

Prints a table in Markdown. With --check: exits 1 if a kernel keeps anything in local memory (a stack, spilled registers), or if FILE, made by the same
compiler, says otherwise than the logs. Needs the standard library only.
"""

import re
import sys

ENTRY = re.compile(r"Compiling entry function '_Z(\d+)(\w+)' for '(sm_\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STACK = re.compile(r"(\d+) bytes cumulative stack size")
SHARED = re.compile(r"(\d+) bytes smem")


def kernels(lines):
    """Of each kernel and architecture: registers, shared memory, stack and spills, in bytes."""
    found, at, frame = {}, None, (0, 0, 0)
    for line in lines:
        if match := ENTRY.search(line):
            name = match.group(2)[:int(match.group(1))].removesuffix("_kernel")
            at = (name, match.group(3))
        elif match := FRAME.search(line):
            frame = tuple(int(n) for n in match.groups())
        elif at and (match := USED.search(line)):
            stack, shared = STACK.search(line), SHARED.search(line)
            found[at] = (int(match.group(1)), int(shared.group(1)) if shared else 0,
                         max(frame[0], int(stack.group(1)) if stack else 0), frame[1] + frame[2])
            at = None
    return found


def table(found, compiler):
    lines = ["# What each kernel takes of a device", "",
             f"{compiler}; blocks of 256 threads. `make cuda-resources` writes this file.", "",
             "| kernel | sm | registers | shared, bytes | stack, bytes | spills, bytes |", "|---|---|---|---|---|---|"]
    for (name, sm), (registers, shared, stack, spills) in sorted(found.items()):
        lines.append(f"| {name} | {sm[3:]} | {registers} | {shared} | {stack} | {spills} |")
    return "\n".join(lines) + "\n"


def main(arguments):
    check = arguments[arguments.index("--check") + 1] if "--check" in arguments else None
    logs = [a for a in arguments if a not in ("--check", check)]
    compiler, lines = "nvcc", []
    for log in logs:
        with open(log, encoding="utf-8") as file:
            lines += file.read().splitlines()
    for line in lines:
        if line.startswith("compiler: "):
            compiler = line.removeprefix("compiler: ")
    found = kernels(lines)
    text = table(found, compiler)
    if not check:
        print(text, end="")
        return 0
    bad = [f"{name} ({sm})" for (name, sm), of in found.items() if of[2] or of[3]]
    if bad:
        print("in local memory: " + ", ".join(bad))
    with open(check, encoding="utf-8") as file:
        written = file.read()
    other = compiler in written and written != text
    if other:
        print(f"{check} is not what the compiler says: make cuda-resources")
    print(f"{len(found)} kernels")
    return 1 if bad or other or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
