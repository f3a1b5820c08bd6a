"""The mover: carries published versions on to the further tiers, in the background, in the order in which they were published.

Every tier has a lane. Data goes ahead in parallel; what publishes it (the entry, the tombstone) follows strictly in order, so that a
tier never shows a file before those that its writer had closed earlier: a ``.metadata`` without its data, a pointer without its target.
A failing tier holds up its own lane only. All of it runs on the session's event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tierstore.errors import DeadlineError, IntegrityError, NotFoundError, SaveError, StorageError, TierStoreError
from tierstore.format.index import FileEntry as Digests
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.copying import CopyContext, VerifiedSource
from tierstore.tiers.files.entry import FileEntry
from tierstore.tiers.files.looking import Held, Key, OnTier, group
from tierstore.tiers.files.places import Mark
from tierstore.tiers.files.placing import FilePut, clean, place_data, place_entry, take_away
from tierstore.tiers.retry import Backoff, Verdict, judge
from tierstore.tiers.tier import Tier, Tiers, ensure_tier, still_there
from tierstore.tiers.together import happens, only_ours_to_cancel

__all__ = ["Item", "Lane", "Mover", "MoverOptions", "PendingFile", "on_this"]

log = logging.getLogger(__name__)

_AHEAD = 16
"""How many items of a lane have their data under way while the first one waits for its turn."""
_KEYS = 10_000
"""Of how many paths a lane knows how often it has changed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverOptions:
    """Times in seconds, as for checkpoints (`tiers.jobs.WorkerOptions`)."""

    retry_first_s: float = 0.5
    retry_most_s: float = 60.0
    patience_s: float = 60.0
    """A drain without a deadline gives up on a tier that has failed for so long. Nothing is lost: the next process goes on."""
    look_again_s: float = 600.0
    """After how long this process looks again at what it left to others, see `reconcile.TakenOver`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFile:
    """A version that is not on a tier yet. `nbytes_done` of its `nbytes` bytes are under way or there."""

    path: str
    tier: str
    nbytes: int
    nbytes_done: int
    removal: bool
    reason: str
    failing_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """One version that has to get onto further tiers. `entry`: what proves its bytes; None for a removal or a folder."""

    put: FilePut
    entry: FileEntry | None
    waits: set[str] = field(default_factory=set)
    failures: dict[str, TierStoreError] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.put.key


class _NoSource(Exception):
    """No tier gave the bytes; `error` says why."""

    def __init__(self, error: TierStoreError) -> None:
        super().__init__(error.message)
        self.error = error


class Lane:
    """The work for one tier."""

    def __init__(self, mover: Mover, tier: Tier, options: MoverOptions) -> None:
        self._mover = mover
        self.tier = tier
        self._items: list[Item] = []
        # Its own: a tier that hangs must take neither the turns nor the memory of the others.
        self._slots = asyncio.Semaphore(mover.context.files_in_flight)
        shared = mover.context.budget
        self._budget = ByteBudget(max(1, shared.nbytes // max(1, len(mover.tiers) - 1)), patience_s=shared.patience_s)
        self._carrying: dict[Item, asyncio.Task[bool]] = {}
        self._done: dict[Item, int] = {}
        self._seen: dict[Item, tuple[int, OnTier]] = {}
        self._times: dict[Key, int] = {}
        self._backoff = Backoff(base_s=options.retry_first_s, cap_s=options.retry_most_s)
        self._wake = asyncio.Event()
        self._kicked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.trouble: TierStoreError | None = None
        self.failing_since: float | None = None

    @property
    def items(self) -> Sequence[Item]:
        return self._items

    @property
    def failing_s(self) -> float:
        """For how long every try has failed, in seconds; 0 while it works."""
        return 0.0 if self.failing_since is None else time.monotonic() - self.failing_since

    def add(self, item: Item) -> None:
        """Takes an item in, in its place: items go by the time of their publication."""
        bisect.insort(self._items, item, key=lambda one: one.put.mark.save_id)
        item.waits.add(self.tier.name)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def kick(self) -> None:
        """Tries again now, whatever it waits for."""
        self._kicked.set()

    def pending(self) -> Iterable[PendingFile]:
        for number, item in enumerate(tuple(self._items)):
            trouble = f"tried again: {type(self.trouble).__name__}: {self.trouble.message}" if self.trouble is not None else ""
            under_way = "being copied" if item in self._carrying else "its turn"
            yield PendingFile(
                path=item.put.path,
                tier=self.tier.name,
                nbytes=item.put.nbytes,
                nbytes_done=self._done.get(item, 0),
                removal=item.put.kind == "gone",
                reason=trouble if trouble and not number else under_way,
                failing_s=self.failing_s,
            )

    async def end(self) -> None:
        """Stops, whatever is left."""
        tasks = [*([self._task] if self._task is not None else []), *self._carrying.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._carrying.clear()

    async def _run(self) -> None:
        """Works until nothing is left."""
        try:
            while self._items:
                for item in self._items[:_AHEAD]:
                    if item not in self._carrying:
                        self._carrying[item] = asyncio.ensure_future(self._carried(item))
                first = self._items[0]
                self._wake.clear()
                waking = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait({self._carrying[first], waking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
                if self._items[0] is first and self._carrying[first].done():
                    await self._conclude(first)
        finally:
            for task in self._carrying.values():
                task.cancel()

    async def _conclude(self, item: Item) -> None:
        """The first item's data is there, or failed: publishes it, or waits and tries again."""
        try:
            wanted = self._carrying[item].result()
            if wanted:
                await only_ours_to_cancel(self._publish(item))
        except asyncio.CancelledError:
            raise
        except TierStoreError as error:
            await self._failed(item, error, judge(error) if not isinstance(error, NotFoundError) else Verdict.REPORT)
        except _NoSource as error:
            verdict = Verdict.FAIL if isinstance(error.error, (IntegrityError, NotFoundError)) else judge(error.error)
            await self._failed(item, error.error, verdict)
        except Exception as error:  # boundary: a fault in the program ends this copy, not the lane
            log.exception("tier=%s file=%r unexpected failure", self.tier.name, item.put.path)
            failure = SaveError(f"unexpected {type(error).__name__} while copying {item.put.path!r}: {error}", hint="report this fault")
            failure.__cause__ = error
            await self._failed(item, failure, Verdict.FAIL)
        else:
            if self.trouble is not None:
                log.warning("tier=%s works again", self.tier.name)
            self.trouble, self.failing_since = None, None
            self._backoff.reset()
            self._end(item)
            await self._mover.settled(item)

    def _end(self, item: Item, error: TierStoreError | None = None) -> None:
        self._items.remove(item)
        self._done.pop(item, None)
        self._seen.pop(item, None)
        task = self._carrying.pop(item, None)
        if task is not None and task.done() and not task.cancelled():
            task.exception()
        self._mover.left_lane(item, self.tier, error)

    async def _failed(self, item: Item, error: TierStoreError, verdict: Verdict) -> None:
        for other in [one for one, task in self._carrying.items() if task.done()]:
            task = self._carrying[other]
            if task.cancelled() or task.exception() is not None or other is item:
                del self._carrying[other]
        if verdict is Verdict.FAIL:
            log.error("tier=%s file=%r can't be brought there: %s", self.tier.name, item.put.path, error.message)
            self._end(item, error)
            return
        now = time.monotonic()
        if self.trouble is None or type(self.trouble) is not type(error):
            log.warning("tier=%s file=%r will be tried again: %s", self.tier.name, item.put.path, error.message)
        self.trouble = error
        self.failing_since = now if self.failing_since is None else self.failing_since
        self._mover.changed.set()
        self._kicked.clear()
        await happens(self._kicked, self._backoff.next_s())

    async def _carried(self, item: Item) -> bool:
        """As `_carry`, which is made only when this begins: a lane that ends at once leaves no coroutine that nobody has awaited."""
        return await only_ours_to_cancel(self._carry(item))

    async def _carry(self, item: Item) -> bool:
        """Brings the bytes onto the tier; returns whether the item is still wanted there.

        Raises:
            TierStoreError: The tier failed.
            _NoSource: No other tier gave good bytes.
        """
        put, tier, context = item.put, self.tier, self._mover.context
        if self._mover.is_removed(item):
            return False
        await ensure_tier(context.tiers, tier)
        await still_there(context.tiers, tier)
        async with self._slots:
            if self._mover.is_removed(item):
                return False
            self._seen[item] = self._times.get(item.key, 0), await on_this(tier, put)  # ahead, as its entry is put in its turn
            if item.entry is None or not put.nbytes:
                return True
            if await _length(tier, put.data_path) == put.nbytes:
                self._done[item] = put.nbytes
                return True
            failures: list[tuple[Tier, TierStoreError]] = []
            digests = Digests(name=put.path, nbytes=put.nbytes, block_digests=item.entry.blocks)
            for source in context.tiers:
                if source.name == tier.name or source.name in context.tiers.outages:
                    continue
                self._done[item] = 0
                verified = VerifiedSource(
                    source.storage, put.data_path, digests, item.entry.block_nbytes, self._budget, lambda n: self._count(item, n)
                )
                try:
                    await place_data(tier, put, verified, context.limits)
                except TierStoreError as error:
                    if verified.failure is None:
                        await still_there(context.tiers, source)
                        raise
                    failures.append((source, verified.failure))
                    if not isinstance(error, NotFoundError):
                        log.warning("tier=%s file=%r unusable as a source: %s", source.name, put.path, error.message)
                else:
                    self._done[item] = put.nbytes
                    return True
        if await self._mover.is_replaced(put):
            log.info("tier=%s file=%r version %d was replaced before it came here", tier.name, put.path, put.mark.version)
            return False
        raise _NoSource(_no_source(put, tier, failures))

    def _count(self, item: Item, nbytes: int) -> None:
        self._done[item] = min(self._done.get(item, 0) + nbytes, item.put.nbytes)

    def _note(self, item: Item) -> None:
        if len(self._times) > _KEYS:
            self._times.clear()
            self._seen.clear()
        self._times[item.key] = self._times.get(item.key, 0) + 1

    async def _publish(self, item: Item) -> None:
        """Publishes on the tier what is not older than what it has; then takes away what is older than the newest."""
        put, tier = item.put, self.tier
        if self._mover.is_removed(item):
            await tier.storage.delete([put.data_path])
            return
        times, on_tier = self._seen.get(item, (-1, OnTier()))
        if times != self._times.get(item.key, 0):  # this lane has changed it since
            on_tier = await on_this(tier, put)
        newest = on_tier.newest
        if newest is None or newest < put.mark:
            await place_entry(tier, put)
            self._note(item)
            if self._mover.is_removed(item):  # meanwhile
                await take_away(tier, put)
                return
            held = on_tier.marks.setdefault(put.mark, _held(put))
            held.entry, held.gone = (put.nbytes, False) if put.kind == "entry" else (None, True)
        await self._mover.clean(tier, put, on_tier)


class Mover:
    """All lanes of one process.

    Args:
        context: The tiers and the limits that copies share.
        options: The rules.
        owner: This process, as entries name it.
    """

    def __init__(self, context: CopyContext, options: MoverOptions, owner: str = "") -> None:
        self.context = context
        self.options = options
        self.owner = owner
        self.errors: list[TierStoreError] = []
        self.changed = asyncio.Event()
        self._lanes: dict[str, Lane] = {}
        self._by_key: dict[Key, list[Item]] = {}
        self._removed: dict[Key, Mark] = {}
        self._kept: set[tuple[str, Key]] = set()

    @property
    def tiers(self) -> Tiers:
        return self.context.tiers

    def knows(self, put: FilePut) -> bool:
        """Whether it is on its way already."""
        return any(item.put.mark == put.mark for item in self._by_key.get(put.key, ()))

    def add(self, item: Item, targets: Iterable[Tier]) -> Item:
        """Takes an item in for the tiers that lack it; a removal counts at once for what is on its way before it.

        Returns the item that stands for it: who looks at what tiers lack may have seen the version before its publication returned, and
        have sent it on its way.
        """
        if item.put.kind == "gone":
            if len(self._removed) > _KEYS:
                self._removed = {key: mark for key, mark in self._removed.items() if key in self._by_key}
            self._removed[item.key] = max(item.put.mark, self._removed.get(item.key, item.put.mark))
        items = self._by_key.get(item.key, [])
        known = next((one for one in items if one.put.mark == item.put.mark), None)
        item = known if known is not None else item
        targets = [tier for tier in targets if tier.name not in item.waits]
        if targets and known is None:
            self._by_key.setdefault(item.key, []).append(item)
        for tier in targets:
            lane = self._lanes.get(tier.name)
            if lane is None:
                lane = self._lanes[tier.name] = Lane(self, tier, self.options)
            lane.add(item)
        return item

    def further(self, at: Tier) -> list[Tier]:
        """Where a version goes that was published on `at`: the tiers after it, and shared ones before it that did not take it."""
        number = self.tiers.names.index(at.name)
        return [t for n, t in enumerate(self.tiers) if n > number or (n < number and t.scope == "shared")]

    def pending(self) -> list[PendingFile]:
        """What is not where it should be yet, lane by lane, in order."""
        return [one for name in self.tiers.names if name in self._lanes for one in self._lanes[name].pending()]

    def wanted_from(self, tier: Tier, key: Key) -> set[Mark]:
        """The versions of a path that other lanes have still to copy from `tier`, if they were not removed."""
        items = self._by_key.get(key, ())
        return {i.put.mark for i in items if i.entry is not None and i.waits - {tier.name} and not self.is_removed(i)}

    def is_removed(self, item: Item) -> bool:
        """Whether this process has removed the path since: then nobody needs to see what is removed."""
        removed = self._removed.get(item.key)
        return removed is not None and removed > item.put.mark and item.put.kind != "gone"

    def left_lane(self, item: Item, tier: Tier, error: TierStoreError | None) -> None:
        """An item is on `tier` now, or never will be."""
        item.waits.discard(tier.name)
        if error is not None:
            item.failures[tier.name] = error
            self.errors.append(error)
        if not item.waits:
            items = self._by_key[item.key]
            items.remove(item)
            if not items:
                del self._by_key[item.key]
        self.changed.set()

    def is_moving(self, path: str, mark: Mark) -> bool:
        """Whether a version is still being carried to some tier."""
        return any(item.put.mark == mark for item in self._by_key.get((path, False), ()))

    async def is_replaced(self, put: FilePut) -> bool:
        """Whether some tier holds a newer version: its bytes were deleted for that, and not lost."""
        for tier in self.tiers:
            try:
                newest = (await on_this(tier, put)).newest
            except (StorageError, NotFoundError):
                continue
            if newest is not None and newest > put.mark:
                return True
        return False

    async def clean(self, tier: Tier, put: FilePut, on_tier: OnTier, *, than: Mark | None = None) -> None:
        """Deletes on a tier what a newer version (`than`, or the newest there) has replaced, but for what lanes still copy from it."""
        keep = self.wanted_from(tier, put.key)
        newest = than or on_tier.newest
        if any(mark in keep and mark != newest for mark in on_tier.marks):
            self._kept.add((tier.name, put.key))
        else:
            self._kept.discard((tier.name, put.key))
        await clean(tier, put.path, on_tier, is_folder=put.is_folder, keep=keep, than=than)

    async def settled(self, item: Item) -> None:
        """An item came onto a tier. When it is everywhere, the tiers that kept an older version for it let it go."""
        if item.waits:
            return
        for tier in self.tiers:
            if tier.name in self.tiers.outages:
                continue
            try:
                # A further tier that was quicker than others may hold older versions too: a listing of a bucket only where that is so.
                if tier.storage.capabilities.local or (tier.name, item.key) in self._kept:
                    on_tier = await on_this(tier, item.put)
                    if len(on_tier.marks) > 1:
                        await self.clean(tier, item.put, on_tier)
            except (StorageError, NotFoundError) as error:
                log.debug("tier=%s file=%r older versions stay for now: %s", tier.name, item.put.path, error.message)

    async def wait_for(self, item: Item, tier: str, patience_s: float) -> None:
        """Waits until an item is on `tier`.

        Raises:
            DeadlineError: The tier has failed for `patience_s` seconds; the item stays on its way.
            TierStoreError: It can't be brought there.
        """
        while tier in item.waits:
            self._give_up_on(self._lanes[tier], patience_s, item)
            self.changed.clear()
            await happens(self.changed, 1.0)
        if tier in item.failures:
            raise item.failures[tier]

    async def wait_for_all(self, items: Iterable[Item], tier: Tier, within_s: float | None) -> bool:
        """Waits until each of `items` is on `tier`, or never will be, `within_s` seconds at most (None: without end); returns whether."""
        end = None if within_s is None else time.monotonic() + within_s
        waiting = [item for item in items if tier.name in item.waits]
        while waiting and (end is None or time.monotonic() < end):
            self.changed.clear()
            await happens(self.changed, 1.0 if end is None else max(0.0, min(1.0, end - time.monotonic())))
            waiting = [item for item in waiting if tier.name in item.waits]
        return not waiting

    async def drain(self, timeout_s: float | None) -> None:
        """Waits until everything is where it should be.

        Raises:
            DeadlineError: Not within `timeout_s` seconds, or, without one, a tier has failed for `patience_s` seconds.
            TierStoreError: Something can't be brought where it should be; the first such error since the last drain.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.kick()
        while any(lane.items for lane in self._lanes.values()):
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left <= 0:
                raise self._late(f"within {round(timeout_s or 0.0, 1):g} s")
            if end is None:
                failing = [lane for lane in self._lanes.values() if lane.items]
                if all(lane.failing_s > self.options.patience_s for lane in failing):
                    raise self._late(f"for {failing[0].trouble.message if failing[0].trouble else 'its tier'}")
            self.changed.clear()
            await happens(self.changed, left)
        errors, self.errors = self.errors, []
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Stops all lanes, whatever is left."""
        for lane in self._lanes.values():
            await lane.end()

    def _give_up_on(self, lane: Lane, patience_s: float, item: Item) -> None:
        if lane.trouble is not None and lane.failing_s >= patience_s:
            raise DeadlineError(
                f"{item.put.path!r} is not on tier {lane.tier.name!r} after {lane.failing_s:.0f} s: {lane.trouble.message}",
                hint="it is published on a nearer tier, and is carried on as soon as the tier answers",
                path=item.put.path,
                tier=lane.tier.name,
            )

    def _late(self, why: str) -> DeadlineError:
        left = self.pending()
        tiers = ", ".join(dict.fromkeys(one.tier for one in left))
        return DeadlineError(
            f"{len(left)} files are not on {tiers} yet (the first: {left[0].path!r}): not done {why}",
            hint="nothing is lost: the next process of this node, or `tierstore sync`, carries them on",
            pending=len(left),
        )


async def on_this(tier: Tier, put: FilePut) -> OnTier:
    """What a tier holds of an item's path."""
    return group(await tier.storage.list(put.place)).get(put.key) or OnTier()


async def _length(tier: Tier, path: str) -> int | None:
    try:
        return (await tier.storage.stat(path)).nbytes
    except NotFoundError:
        return None


def _held(put: FilePut) -> Held:
    """What a tier holds of a version whose data was just brought there."""
    return Held(data=put.nbytes if put.kind == "entry" and put.nbytes else None)


def _no_source(put: FilePut, tier: Tier, failures: Sequence[tuple[Tier, TierStoreError]]) -> TierStoreError:
    """The error for bytes that no tier could give: damage only if no source might still come back with good ones."""
    told = "; ".join(f"{source.name}: {error.message}" for source, error in failures) or "no other tier answers"
    message = f"no tier has a good copy of {put.path!r} for tier {tier.name!r} ({told})"
    for _, error in failures:
        if isinstance(error, StorageError):
            return type(error)(message, hint=error.hint or "bring this tier back", path=put.path, tier=tier.name)
    if not failures:
        return StorageError(message, hint="bring the tiers back", path=put.path, tier=tier.name)
    return IntegrityError(message, hint="write the file again", path=put.path, tier=tier.name)
