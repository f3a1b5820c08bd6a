"""Publishing a version: on the nearest tier that takes it, with room made there, and claimed first where the file must be new."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, IntegrityError, NotFoundError, StorageError, TierFullError, TierStoreError
from tierstore.names import later_save_id
from tierstore.storage.contract import Source
from tierstore.storage.sources import LocalSource, StorageSource
from tierstore.storage.tasks import to_the_end
from tierstore.storage.temporaries import owner_is_dead
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.entry import FileEntry, FileVersion, encode_claim, encode_gone, owner_in
from tierstore.tiers.files.eviction import make_room
from tierstore.tiers.files.looking import Held, Looker, OnTier, State
from tierstore.tiers.files.mover import Item, Mover, on_this
from tierstore.tiers.files.places import Mark, claim_path
from tierstore.tiers.files.placing import FilePut, clean, place_data, place_entry, take_away
from tierstore.tiers.tier import Tier, ensure_tier, still_there
from tierstore.tiers.together import together

__all__ = ["Publisher"]

log = logging.getLogger(__name__)

_AT_ONCE = 16
_CLAIMS = 16
"""How many claims of dead processes one exclusive create steps over."""


class Publisher:
    """Puts versions where they are seen first."""

    def __init__(self, context: CopyContext, clock: Clock, looker: Looker, mover: Mover) -> None:
        self._context = context
        self._tiers = context.tiers
        self._clock = clock
        self._looker = looker
        self._mover = mover
        self._last_id = ""

    def new_mark(self, version: int) -> Mark:
        """A mark that sorts after all that this process has made, so that the order of ULIDs is the order of publication."""
        self._last_id = later_save_id(self._clock.now(), self._last_id)
        return Mark(version=version, save_id=self._last_id)

    def _newer_than(self, state: State) -> Mark:
        """A mark after all that was seen of a path, and after what was not seen but published earlier.

        The authority may not answer, or a tombstone may be gone that said how far others had counted. So the number is the time in
        milliseconds, or one more than the highest, whichever is greater: a hybrid logical clock (Kulkarni et al., 2014). Clocks that
        differ matter only for what was not seen.
        """
        return self._after(state.last_version)

    def _after(self, version: int) -> Mark:
        return self.new_mark(max(version + 1, int(self._clock.now().timestamp() * 1000)))

    async def publish(
        self, path: str, entry: FileEntry, source: Callable[[Tier], Source], *, exclusive: bool = False, is_folder: bool = False
    ) -> tuple[FileVersion, Item]:
        """Publishes bytes as the newest version of `path`, and hands it to the mover.

        Args:
            path: The file, or the folder that is made.
            entry: What proves the bytes.
            source: The bytes, for whichever tier takes them.
            exclusive: It must not exist: one winner among any number of racers.
            is_folder: It is a folder.

        Raises:
            ConflictError: `exclusive`, and it exists or is being created.
            TierFullError, AccessError, StorageError: No tier takes it; the nearest one's error. Nothing was published.
        """
        self._tiers.check_writable()
        state = await self._looker.state(path, is_folder=is_folder)
        if exclusive:
            _refuse_if_live(state)
        put = FilePut.of_entry(path, self._newer_than(state), entry, is_folder=is_folder)
        # Racers have to claim the same number: the next one, and not the time as the version's own.
        draft = _Draft(put=put, entry=entry, to_claim=exclusive, claim=state.last_version + 1)
        try:
            tier = await self._on_one(draft, source)
        except BaseException:
            await to_the_end(self._give_up(draft))
            raise
        return await self._published(tier, draft.put, entry, state)

    async def _on_one(self, draft: _Draft, source: Callable[[Tier], Source]) -> Tier:
        """Publishes on the nearest tier that takes it, and returns that; errors as `publish`."""
        failures: list[TierStoreError] = []
        for tier in self._tiers:
            try:
                await ensure_tier(self._tiers, tier)
                await still_there(self._tiers, tier)
                await self._on(tier, draft, source(tier))
            except (StorageError, NotFoundError) as error:
                if draft.claiming:  # the authority can't tell: for another tier it would be asked the same
                    raise
                failures.append(error)
                log.warning("tier=%s file=%r is not taken here, the next tier is tried: %s", tier.name, draft.put.path, error.message)
            else:
                return tier
        raise failures[0]

    async def remove(self, states: Sequence[State]) -> None:
        """Removes paths, many at once: tombstones on the authority, then on the node's own tiers; the mover carries them to the others.

        Raises:
            StorageError: The authority does not take one: that path was not removed, some others were.
        """
        self._tiers.check_writable()
        removals = []
        for state in states:
            document = encode_gone(state.path, self._mover.owner, self._clock.now())
            mark = self._newer_than(state)
            removals.append(FilePut(path=state.path, is_folder=state.is_folder, mark=mark, nbytes=0, kind="gone", document=document))
        done: dict[FilePut, list[str]] = {}
        try:
            await together(lambda put: self._bury(put, done.setdefault(put, [])), removals, at_once=_AT_ONCE)
        finally:  # in their order, and those too that were removed before one failed
            for put in removals:
                if done.get(put):
                    self._mover.add(Item(put=put, entry=None), [t for t in self._tiers if t.name not in done[put]])

        async def tidy(put: FilePut) -> None:
            for name in done[put]:
                tier = self._tiers.get(name)
                try:  # looked at again: what was on its way may have come since
                    await clean(tier, put.path, await on_this(tier, put), is_folder=put.is_folder)
                except (StorageError, NotFoundError) as error:
                    log.warning("tier=%s file=%r its bytes stay for now: %s", name, put.path, error.message)

        await together(tidy, removals, at_once=_AT_ONCE)

    async def _bury(self, put: FilePut, done: list[str]) -> None:
        """Writes a tombstone; `done` gets the names of the tiers that have it."""
        own = [t for t in self._tiers if t.scope == "node" and not self._tiers.is_authority(t)]
        reach("files.before-gone")
        for tier in (self._tiers.authority, *own):
            try:
                await ensure_tier(self._tiers, tier)
                await still_there(self._tiers, tier)
                await place_entry(tier, put)
            except (StorageError, NotFoundError) as error:
                if self._tiers.is_authority(tier):
                    raise
                log.warning("tier=%s file=%r can't be removed here yet: %s", tier.name, put.path, error.message)
                continue
            done.append(tier.name)
        reach("files.after-gone")

    async def _on(self, tier: Tier, draft: _Draft, source: Source) -> None:
        """Publishes on one tier; leaves nothing there where that fails."""
        placed = draft.put
        try:
            try:
                await place_data(tier, placed, source, self._context.limits)
            except TierFullError as error:
                if not await make_room(self._tiers, tier, placed.nbytes, self._mover):
                    raise
                log.info("tier=%s file=%r has room now: %s", tier.name, placed.path, error.message)
                await place_data(tier, placed, source, self._context.limits)
            if draft.to_claim:
                draft.claiming = True
                await self._claim(tier, draft)
                draft.claiming = False
            await place_entry(tier, draft.put)
        except BaseException:
            await to_the_end(self._take_back(tier, {placed, draft.put}))
            raise

    async def _published(self, tier: Tier, put: FilePut, entry: FileEntry, state: State) -> tuple[FileVersion, Item]:
        item = Item(put=put, entry=entry if put.kind == "entry" and not put.is_folder else None)
        item = self._mover.add(item, self._mover.further(tier))
        on_tier = state.tiers.get(tier.name, OnTier())
        on_tier.marks[put.mark] = Held(entry=put.nbytes, data=put.nbytes or None)
        await self._clean(tier, put, on_tier)
        for nearer in self._tiers.tiers[: self._tiers.names.index(tier.name)]:  # passed over: full, or failing
            if nearer.scope == "node" and (older := state.tiers.get(nearer.name)) is not None:
                await self._clean(nearer, put, older)
        version = FileVersion(
            path=put.path,
            version=put.mark.version,
            save_id=put.mark.save_id,
            nbytes=put.nbytes,
            is_folder=put.is_folder,
            tiers=(tier.name,),
        )
        return version, item

    async def _clean(self, tier: Tier, put: FilePut, on_tier: OnTier) -> None:
        """Older versions go, but those that are still being carried on; what can't be deleted now stays for the next to find."""
        try:
            await self._mover.clean(tier, put, on_tier, than=put.mark)
        except (StorageError, NotFoundError) as error:
            log.warning("tier=%s file=%r older versions stay for now: %s", tier.name, put.path, error.message)

    async def _take_back(self, tier: Tier, puts: Collection[FilePut]) -> None:
        """Nothing is published: removes what lies there."""
        try:
            for put in puts:
                await take_away(tier, put)
        except TierStoreError as error:
            log.debug("tier=%s leftovers stay: %s", tier.name, error.message)

    async def _give_up(self, draft: _Draft) -> None:
        """It was not published: gives the claim back, so that others may create the file."""
        if draft.claimed:
            with suppress(TierStoreError):
                await self._tiers.authority.storage.delete([claim_path(draft.put.path, draft.claim)])

    async def _claim(self, tier: Tier, draft: _Draft) -> None:
        """Wins a number, and with it the right to publish, on the authority; then looks again: the winner of an earlier one may be done.

        The number may be another one than the draft's, if that one was claimed by a process that died. The version is not less than it.

        Raises:
            ConflictError: Somebody else was first.
            StorageError: The authority can't tell.
        """
        path = draft.put.path
        for _ in range(_CLAIMS):
            if not draft.claimed and not await self._create_claim(draft):
                _refuse_if_live(await self._looker.state(path))
                await self._renumber(tier, draft, draft.claim + 1)
                continue
            reach("files.after-claim")
            now = await self._looker.state(path)
            _refuse_if_live(now)
            if now.last_version >= draft.claim:  # created and removed by others meanwhile
                await self._renumber(tier, draft, now.last_version + 1)
                continue
            draft.to_claim = False
            return
        raise ConflictError(f"{path!r} has too many claims of dead processes", hint="remove it and create it again", path=path)

    async def _create_claim(self, draft: _Draft) -> bool:
        """Returns whether the number is ours now; False: it belongs to a process that died. Errors as `_claim`."""
        authority, put = self._tiers.authority, draft.put
        claim = encode_claim(put.path, self._mover.owner, secrets.token_hex(16), self._clock.now())
        await ensure_tier(self._tiers, authority)
        await still_there(self._tiers, authority)  # a claim on an empty mount point is won by everybody
        reach("files.before-claim")
        try:
            await authority.storage.create(claim_path(put.path, draft.claim), claim)
        except ConflictError as error:
            if _is_dead(error.context.get("existing")):
                return False
            raise ConflictError(
                f"{put.path!r} is being created by another process, or was",
                hint="open it once it is there; if its creator is gone for good, remove it and create it again",
                path=put.path,
            ) from error
        draft.claimed = True
        self._looker.answered(authority)
        return True

    async def _renumber(self, tier: Tier, draft: _Draft, claim: int) -> None:
        """Another number; the same bytes under a new version, if that is too low for it: on this tier they lie under the old name."""
        old = draft.put
        draft.claim, draft.claimed = claim, False
        if old.mark.version >= claim:
            return
        draft.put = FilePut.of_entry(old.path, self._after(claim - 1), draft.entry, is_folder=old.is_folder)
        if old.nbytes:
            local = tier.storage.local_path(old.data_path)
            source = StorageSource(tier.storage, old.data_path, old.nbytes)
            await place_data(tier, draft.put, source if local is None else LocalSource(source, local, hard=True), self._context.limits)
            await tier.storage.delete([old.data_path])


@dataclass(slots=True, kw_only=True)
class _Draft:
    """What is being published: which number it has to claim (`to_claim`: still, for good), and whether the claim of that is ours."""

    put: FilePut
    entry: FileEntry
    to_claim: bool
    claim: int
    claiming: bool = False
    claimed: bool = False


def _refuse_if_live(state: State) -> None:
    if state.live is not None:
        raise ConflictError(f"{state.path!r} exists", hint="open it with 'wb' to replace it, or choose another name", path=state.path)


def _is_dead(claim: object) -> bool:
    """Whether a claim's owner provably lives no more; a claim that can't be read is not ours to judge."""
    if not isinstance(claim, bytes):
        return False
    try:
        return owner_is_dead(owner_in(claim, "claim"))
    except IntegrityError:
        return False
