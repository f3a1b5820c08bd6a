"""`TierStorageReader`: torch.distributed.checkpoint loads from a tierstore store, whichever door wrote the checkpoint.

Each wanted box becomes byte ranges of the nearest tier that has them, coalesced over all items, read straight into the destination and
proved by SHA-256. Objects are decoded by the typed codecs: nothing that came from storage is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tierstore.config_models import hydrate_tier
from tierstore.dcp.contents import Contents, contents_of, metadata_of
from tierstore.dcp.filled import Lacking
from tierstore.dcp.place import moved, place_of
from tierstore.dcp.stores import note_generation
from tierstore.errors import NotFoundError, StateMismatchError, UsageError
from tierstore.format.objects import ObjectCodecs
from tierstore.names import Reference
from tierstore.state.agreement import Agreement
from tierstore.state.bits import torch_dtype
from tierstore.state.codecs import default_codecs
from tierstore.state.exchange.exchange import Exchange
from tierstore.state.filling import fill_rules
from tierstore.state.load import load_fresh
from tierstore.state.rank_trees import RankTrees
from tierstore.state.reading import Fill, fill_all
from tierstore.tier_uri import is_tier_uri
from tierstore.tiers.catalog import scan
from tierstore.tiers.hydrate import Hydration
from tierstore.tiers.quantised import generation_of
from tierstore.tiers.replica import Replica
from tierstore.tiers.session import Session
from tierstore.units import format_some

__all__ = ["TierStorageReader"]

_SETTLE_S = 5.0
"""How long a load waits for what it hydrated to count, in seconds; the files are there and used before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """What the coordinator tells a rank, in `LoadPlan.storage_data`: the load's own name, and the rank's place in the group."""

    name: str
    rank: int
    world_size: int


class TierStorageReader(StorageReader):
    """Loads with ``torch.distributed.checkpoint.load`` from a store. Can be pickled at any time. Writes nothing to the store, but for what
    ``load: {hydrate: …}`` of its configuration brings onto this node.

    Args:
        source: ``tier://[NAME]/[config.yaml/]RUN[/step-N | @REFERENCE]``, or a configuration in any form that `tierstore.open` takes; None:
            the first ``checkpoint_id`` says it. Where no checkpoint is named, the latest is loaded.
        run: The run, where `source` does not say it.
        codecs: Codecs for the caller's own types.
        allow_cast: Whether values of another dtype than the destination's are cast, as stock readers do without a word; else an error.
        rank: Whose objects to load (counters, random states); None: this process's rank in the group that loads.
        exchange: ``auto``: what several ranks want is read from afar by one of them, which sends it to the others. ``off``: each reads for
            itself.
        fill: Rules by which a tensor of the state that the checkpoint lacks is filled from others that it has, converted to its dtype, as
            `LoadOptions.fill` has them. ``()``: nothing is; None: as configured (``load: {fill: …}``).

    Raises:
        UsageError: A malformed URI.
        ConfigError: The configuration is wrong or missing.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        run: str | None = None,
        codecs: ObjectCodecs | None = None,
        allow_cast: bool = False,
        rank: int | None = None,
        exchange: Literal["auto", "off"] = "auto",
        fill: Any = None,
    ) -> None:
        if exchange not in ("auto", "off"):
            raise UsageError(f"exchange is {exchange!r}", hint="say 'auto' or 'off'")
        self._place = None if source is None else place_of(source, run)
        self._codecs = codecs
        self.allow_cast = allow_cast
        self.exchange = exchange
        self._rank = rank
        self._fill, self._configured_fill = fill_rules(fill), fill is None
        self._begin()

    def _begin(self) -> None:
        """What a process has for itself."""
        self._session: Session | None = None
        self._hydration: Hydration | None = None
        self._replica: Replica | None = None
        self._contents: Contents | None = None
        self._lacking: Lacking | None = None
        self._own = -1
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_place", "_codecs", "allow_cast", "exchange", "_rank", "_fill", "_configured_fill")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def checkpoint_id(self) -> str | None:
        """What the next load reads, as a ``tier://`` URI; None where nothing was named yet."""
        return None if self._place is None else str(self._place)

    # ---- StorageReader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load. `checkpoint_id`: a ``tier://`` URI, ``step-N``, N, ``latest`` …; options and configuration stay as they are."""
        if checkpoint_id is not None:
            before, self._place = self._place, moved(self._place, checkpoint_id)
            if before is not None and before.config != self._place.config:
                self.close()
        self._let_go()
        self._replica = self._contents = self._lacking = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, each tensor as one chunk, and what rules fill of what was left out of it. Asked for a key, it also
        knows what rules can make, and what was left out and nothing fills: loading that is an error that says so.

        Raises:
            NotFoundError: No such run, step or tag.
            IntegrityError: No tier has a good copy of its manifest, index or objects.
        """
        # Which rank this is within the loading group is told later; keys are the same for all but what only some ranks saved.
        own = self._rank if self._rank is not None else kwargs.get("rank")
        if own is None:
            own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        replica = self._open()
        contents, lacking = self._look(own)
        return metadata_of(contents, lacking, replica.index, str(self._place))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns which rank this is among those that load."""
        self._look(self._rank if self._rank is not None else int(kwargs.get("rank", 0)))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells every rank a name that this load has for itself, under which the ranks exchange what several of them want."""
        if len(plans) == 1 or self.exchange == "off":
            return plans
        name = f"load/{secrets.token_hex(8)}"
        return [replace(plan, storage_data=_Together(name=name, rank=n, world_size=len(plans))) for n, plan in enumerate(plans)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors and gives it its objects. Errors are in the future; nothing is filled where dtypes differ."""
        future: Any = Future()  # torch's stub takes no exception
        try:
            self._read(plan, planner)
        except Exception as error:  # noqa: BLE001 - boundary: the future carries it to DCP, which tells all ranks
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            self._let_go()
            if self._hydration is not None and self._session is not None:
                self._session.run(self._hydration.settled(_SETTLE_S))
        done: Future[None] = future
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for ``tier://`` URIs only; a `Path` that was one raises UsageError."""
        return is_tier_uri(checkpoint_id)

    def close(self) -> None:
        """Ends what the reader has open; the next load opens it again."""
        session, pid, hydration = self._session, self._pid, self._hydration
        self._begin()
        if session is not None and pid == os.getpid():
            if hydration is not None:
                session.run(hydration.close(_SETTLE_S))
            session.close()

    # ---- inside

    def _let_go(self) -> None:
        """Ends the lease that kept the checkpoint from being deleted: a reader may live as long as its training."""
        if self._replica is not None:
            self._replica.let_go()

    def _open(self) -> Replica:
        if self._place is None:
            raise UsageError("the reader knows no checkpoint", hint="pass checkpoint_id='tier:///RUN/step-N', or TierStorageReader(…)")
        if self._session is None or self._pid != os.getpid():
            self._begin()
            self._session = Session.open(self._place.config, create=False)
        if self._replica is None:
            wanted = self._place.reference or Reference(run="", selector="latest")
            catalog = self._session.run(scan(self._session.tiers, self._place.run))
            self._replica = self._session.open_replica(catalog.resolve(wanted))
            self._replica.on_lossy = note_generation
            note_generation(generation_of(self._replica.manifest.facts))
            if (tier := hydrate_tier(self._place.config)) is not None:
                self._replica.hydrating = self._hydration_of(self._session).onto(self._session.tiers.get(tier))
        return self._replica

    def _hydration_of(self, session: Session) -> Hydration:
        if self._hydration is None:
            io = session.config.io
            self._hydration = Hydration(
                session.tiers, session.clock, session.leases, stall_s=io.stall_timeout_s, files_in_flight=io.threads
            )
        return self._hydration

    def _run(self) -> Any:
        assert self._session is not None
        return self._session.run

    def _look(self, rank: int) -> tuple[Contents, Lacking]:
        """The contents as `rank` sees them, its own tree first, then what only other ranks saved; and what they lack."""
        if self._contents is not None and self._lacking is not None and self._own == rank:
            return self._contents, self._lacking
        replica = self._open()
        trees = RankTrees(replica, self._run(), rank=rank, world_size=None)
        contents = contents_of(trees.own() if trees.alike else trees.united()[0])
        assert self._place is not None
        rules = fill_rules(self._place.config.load.fill) if self._configured_fill else self._fill
        lacking = Lacking(index=replica.index, rules=rules, left_out=contents.left_out)
        self._contents, self._lacking, self._own = contents, lacking, rank
        return contents, lacking

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        replica, contents, lacking = self._open(), self._contents, self._lacking
        if contents is None or lacking is None:
            raise UsageError("read_data before read_metadata", hint="DCP calls them in order; call reader.read_metadata() first")
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        objects: list[tuple[ReadItem, Any]] = []
        with self._filling(plan, replica) as fill:
            fills = self._fills(plan, planner, replica, contents, lacking, filled)
            for item in (item for item in plan.items if item.type is LoadItemType.BYTE_IO):
                path = contents.paths.get(item.storage_index.fqn, ())
                node, is_whole = lacking.whole_object(_known(contents.objects, item).node, path, fills)
                if is_whole:
                    objects.append((item, node))
            lacking.check(partial=getattr(planner, "allow_partial_load", False))
            fill(fills)
        lacking.filling.tell(_what(replica), loudly=self._own == 0)
        for item, target in filled:
            planner.commit_tensor(item, target)
        codecs = self._codecs or default_codecs()
        for item, node in objects:
            value = load_fresh(replica, self._run(), node, codecs)
            stream = io.BytesIO()
            torch.save(value, stream)  # DCP's planners take an object as a pickle: this one is ours, of what the codecs decoded
            stream.seek(0)
            planner.load_bytes(item, stream)

    @contextlib.contextmanager
    def _filling(self, plan: LoadPlan, replica: Replica) -> Iterator[Callable[[Sequence[Fill]], None]]:
        """What fills tensors: with the other ranks where they load together, who then hear of an error of this one; else alone."""
        together = plan.storage_data
        if not isinstance(together, _Together):
            yield partial(fill_all, replica, self._run())
            return
        assert self._session is not None
        config = self._session.config
        deadline_s = config.save.agreement_timeout_s
        agreement = Agreement.named(together.name, rank=together.rank, world_size=together.world_size, deadline_s=deadline_s)
        with Exchange(agreement, what=_what(replica), budget_nbytes=config.io.max_scratch) as exchange:
            yield partial(exchange.fill, replica, self._run())

    def _fills(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        replica: Replica,
        contents: Contents,
        lacking: Lacking,
        filled: list[tuple[ReadItem, torch.Tensor]],
    ) -> list[Fill]:
        """The tensors' wishes, checked; the planner's targets are put into `filled`."""
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        stored = [item for item in tensors if item.storage_index.fqn in contents.tensors]
        replica.index.prepare(contents.tensors[item.storage_index.fqn] for item in stored)
        fills: list[Fill] = []
        for item in stored:
            entry = replica.index.find(contents.tensors[item.storage_index.fqn])
            target = planner.resolve_tensor(item)
            filled.append((item, target))
            fills.append(Fill(entry=entry, box=_box(item), target=target.detach()))
        if not self.allow_cast:
            _check_dtypes(filled, fills)
        for item in (item for item in tensors if item.storage_index.fqn not in contents.tensors):
            if lacking.metadata(item.storage_index.fqn) is None:
                _known(contents.tensors, item)
            target = planner.resolve_tensor(item)
            if (wish := lacking.wish(item.storage_index.fqn, _box(item), target.detach())) is not None:
                filled.append((item, target))
                fills.append(wish)
        return fills


def _what(replica: Replica) -> str:
    return f"the load of step {replica.info.step} of run {replica.info.run!r}"


def _box(item: ReadItem) -> tuple[range, ...]:
    return tuple(range(begin, begin + length) for begin, length in zip(item.storage_offsets, item.lengths, strict=True))


def _known(table: Any, item: ReadItem) -> Any:
    key = item.storage_index.fqn
    if key not in table:
        raise NotFoundError(f"the checkpoint has no {item.type.name.lower()} {key!r}", hint="plan with the metadata of read_metadata()")
    return table[key]


def _check_dtypes(filled: list[tuple[ReadItem, torch.Tensor]], fills: list[Fill]) -> None:
    wrong = {
        item.dest_index.fqn: f"{item.dest_index.fqn} (stored {fill.entry.dtype}, wanted {str(target.dtype).removeprefix('torch.')})"
        for (item, target), fill in zip(filled, fills, strict=True)
        if target.dtype != torch_dtype(fill.entry.dtype)
    }
    if wrong:
        shown = format_some(wrong.values(), 8)
        raise StateMismatchError(
            f"the dtypes of {len(wrong)} tensors differ: {shown}; nothing was changed",
            hint="make the state with the stored dtypes, or cast on purpose: TierStorageReader(…, allow_cast=True)",
        )
