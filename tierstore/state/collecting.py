"""Python's cyclic garbage collector, kept from looking through a plan again and again while it is being made.

A plan of 50,000 tensors is some 500,000 objects, all of which stay; the collector, which starts after every 700 new ones, takes as long to
find that out as making them does. Nothing that is made here lies in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles while it lasts; nothing changes where the program has switched the collector off itself.

    What is there at its end counts as looked at: the collector would else go through all of the plan at once, and through the rest of the
    process with it. It is the process's: what other threads make meanwhile, in the milliseconds that a plan takes, is looked at with what
    is old. Where two threads overlap, it ends with the first.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else they are the program's, to be looked at never
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a look at any of them
        gc.enable()
