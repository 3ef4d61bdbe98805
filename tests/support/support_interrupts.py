"""Interrupts wherever Python handles signals."""

import sys


def interrupted(call):
    """Calls a function again and again. The Nth call is interrupted at its Nth place; yields N after each one, until a call has fewer places.

    CPython handles signals where a Python function begins and where a function in C has returned. It handles none between `__enter__` in C
    and the block (version 3.14 may; python/cpython#148874).
    """
    number, errors = 0, []  # errors are kept, as a notebook keeps the last one: their traces hold what the call has left open
    while True:
        number += 1
        left = number

        def profile(frame, event, function):
            nonlocal left
            if event == "call" or (event == "c_return" and function.__name__ != "__enter__"):
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            call()
        except KeyboardInterrupt as error:
            errors.append(error)
        finally:
            sys.setprofile(None)
        if left > 0:
            return
        yield number
