"""
The table of docs/run.md, "After an attempt", in Python, and whether a journal agrees with it. It knows nothing of supervise/.
"""

from jobs_support import check

GAVE_UP, USAGE, CANNOT_RUN, NOT_FOUND, KILLED, TERMINATED = 93, 2, 126, 127, 137, 143
CRASHES = {3, 4, 5, 6, 7, 8, 11, 31}  # signals that a program brings upon itself


def progressed(a):
    """Has the attempt made a checkpoint with a higher step than all before it?"""
    return a["last_step"] is not None and (a["first_step"] is None or a["last_step"] > a["first_step"])


def is_done(a):
    return a["exit"] == 0 and not a["hung"] and not a["unhealthy"]


def counts(a):
    return not a["stopped_by"]


def own_failure(a):
    """Would the same command fail again? SIGKILL and SIGTERM come from outside; 137 and 143 are how launchers report them."""
    outside = a["hung"] or a["unhealthy"] or a["exit"] in (KILLED, TERMINATED)
    return not outside and (a["exit"] is not None or a["signal"] in CRASHES or (a["exit"] is a["signal"] is None and a["reason"] != "supervisor died"))


def futile(attempts):
    """How many attempts in a row had no newer checkpoint."""
    count = 0
    for a in attempts:
        count = 0 if progressed(a) else count + counts(a)
    return count


def alike_before(attempts):
    """The attempt before the last one that counts, if both ended alike without a newer checkpoint; None: they did not."""
    last = attempts[-1]
    before = next((a for a in reversed(attempts[:-1]) if counts(a)), None)
    same = before and all(before[k] == last[k] for k in ("exit", "signal", "last_step")) and own_failure(last) and own_failure(before)
    return before if same and not progressed(before) and not progressed(last) else None


def rulings(attempts, number_here, options):
    """
    What may follow the last of these attempts: pairs of a verdict's beginning and an exit status, None for another attempt.
    attempts: those since the command was last done or given up. number_here: of the last attempt, since `run` was started.
    """
    a = attempts[-1]
    if a["stopped_by"]:
        return [("stopped by", 128 + a["stopped_by"])]
    if is_done(a):
        return [("done", 0)]
    if a["unhealthy"] and options.on_anomaly == "stop":
        return [("gave up", GAVE_UP)]
    if number_here == 1 and a["reason"].startswith("cannot start"):
        return [(a["reason"], NOT_FOUND if "No such file" in a["reason"] else CANNOT_RUN)]
    if number_here == 1 and not progressed(a) and a["exit"] in (USAGE, CANNOT_RUN, NOT_FOUND) and a["seconds"] < 10:
        return [(a["reason"], a["exit"])]
    full = [("the disk is full", 1)] if futile(attempts) else []
    if futile(attempts) >= options.max_futile:
        return [("gave up: no newer checkpoint", GAVE_UP), *full]
    before = alike_before(attempts)
    again = [("gave up: restarted", 1)] if number_here > options.max_restarts else [("restarts in", None)]
    if futile(attempts) > 1 and before:
        moved = before["checkpoint"] != a["checkpoint"] or a["checkpoint"] is None
        return [("gave up: ", GAVE_UP), *full, *([] if moved else again)]  # an older checkpoint may be left
    return again + full


def settled(a):
    return a["status"] in (0, GAVE_UP, USAGE, CANNOT_RUN, NOT_FOUND)


def check_attempts(attempts, before, options, status):
    """The journal after a supervisor has ended with this status. before: how many attempts it had when it was started."""
    check([a["attempt"] for a in attempts] == list(range(1, len(attempts) + 1)), "the attempts are not numbered 1, 2, ...")
    here = first = 0
    for i, a in enumerate(attempts):
        check(a["end"] and a["reason"] and a["verdict"], f"attempt {a['attempt']} has no end in the journal: {a}")
        if i and settled(attempts[i - 1]):
            first = i
        here = here + 1 if i > before else 1
        if i >= before:
            found = (a["verdict"], a["status"])
            allowed = rulings(attempts[first:i + 1], here, options)
            agrees = any(found[0].startswith(verdict) and found[1] == code for verdict, code in allowed)
            check(agrees, f"attempt {a['attempt']} has the verdict {found}, not one of {allowed}: {a}")
            check_start(attempts[first:i], a)
            check_lost(attempts[:i], a)
    last = attempts[-1]["status"] if len(attempts) > before else status
    check(last == status, f"the journal says {last}, the exit status is {status}")


def check_start(earlier, a):
    """An attempt starts from the newest checkpoint, unless two attempts from there have failed or it is bad, and trains the step after it."""
    step = int(a["checkpoint"].partition("@")[2]) if a["checkpoint"] else 0
    if not a["suspect"] and futile(earlier) < 2 and not any(e["unhealthy"] for e in earlier):
        check(step == (a["first_step"] or 0), f"attempt {a['attempt']} started from {a['checkpoint']}, not from step {a['first_step']}")
    check(a["first_trained"] in (None, step + 1), f"attempt {a['attempt']} started from {a['checkpoint']} and trained step {a['first_trained']} first")
    if a["hung"]:
        check(a["hang"] and a["reason"].startswith(("hung: ", "stopped by")), f"the journal does not say what stood still: {a}")


def check_lost(earlier, a):
    """Steps that were made before, by the last attempt that is known to have made any, and had to be made again."""
    step = int(a["checkpoint"].partition("@")[2]) if a["checkpoint"] else 0
    reached = next((e["last_trained"] for e in reversed(earlier) if e["last_trained"] is not None), None)
    known = [s for s in (reached, a["first_step"] if a["checkpoint"] or reached is not None else None) if s is not None]
    expected = max(0, max(known) - step) if known else None
    check(a["steps_lost"] == expected, f"attempt {a['attempt']} has lost {a['steps_lost']} steps, not {expected}: {a}")


def steps_made(attempts):
    """All steps that the attempts have made, one by one; None: that is not known of some."""
    if any(a["reason"] == "supervisor died" for a in attempts):
        return None
    return sum(a["last_trained"] - a["first_trained"] + 1 for a in attempts if a["last_trained"] is not None)
