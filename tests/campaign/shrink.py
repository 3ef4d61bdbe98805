"""Removes commands from a failed script, as long as it fails in the same way."""

import time


def shrink(ops, failure, again, limit):
    """Returns (commands, failure, player) of the shortest script that was found within `limit` seconds."""
    end = time.monotonic() + limit
    best = again(ops)
    if best[0] is None or best[0].kind != failure.kind:
        return ops, failure, best[2]  # the failure does not repeat

    def fails(some):
        nonlocal best
        found = again(some)
        if found[0] is not None and found[0].kind == failure.kind:
            best = found
            return True
        return False

    kept, size = best[1], max(len(best[1]) // 2, 1)
    while time.monotonic() < end:
        removed, i = False, 0
        while i < len(kept) and time.monotonic() < end:
            shorter = kept[:i] + kept[i + size:]
            if shorter and fails(shorter):
                kept, removed = best[1], True
            else:
                i += size
        if size == 1 and not removed:
            break
        size = max(size // 2, 1)
    return kept, best[0], best[2]
