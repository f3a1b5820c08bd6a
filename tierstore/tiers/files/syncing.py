"""`sync_files`: what ``tierstore sync`` does about files: carries on whatever some tier lacks, whoever published it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from tierstore.errors import DeadlineError, TierStoreError
from tierstore.storage.temporaries import temporary_name
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.mover import Mover, MoverOptions, PendingFile
from tierstore.tiers.files.reconcile import Lacking, look_at_files, take_over, tidy
from tierstore.tiers.session import Session

__all__ = ["FilesReport", "sync_files"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReport:
    """What came of it: what tiers lacked when it began, and what they still lack."""

    lacking: tuple[Lacking, ...] = ()
    left: tuple[PendingFile, ...] = ()
    failed: tuple[tuple[str, str, TierStoreError], ...] = ()
    """Path, tier and error."""


async def sync_files(
    session: Session,
    *,
    context: CopyContext | None = None,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    patience_s: float | None = None,
) -> FilesReport:
    """Brings every file onto every tier that should have it, in the order of publication, and tidies up.

    It waits for nobody: two processes that copy the same version write the same bytes under the same name, each in order.

    Args:
        session: The store.
        context: The limits of the copies; None: what the configuration says.
        only: Names of the tiers to fill; None: all.
        dry_run: Only look.
        patience_s: How long a tier may keep failing, in seconds; None: what the configuration says.

    Raises:
        StorageError: No tier answers.
    """
    tiers, clock, config = session.tiers, session.clock, session.config
    if len(tiers) == 1:
        return FilesReport()
    context = context or CopyContext.make(tiers, clock, files_in_flight=config.io.threads)
    mover = Mover(context, MoverOptions(patience_s=config.save.patience_s if patience_s is None else patience_s), temporary_name("file"))
    try:
        picture = await look_at_files(tiers)
        lacking = picture.lacking(now=clock.now(), only=only)
        if dry_run:
            return FilesReport(lacking=tuple(lacking))
        taken = await take_over(lacking, mover, now=clock.now(), all_of_them=True)
        try:
            await mover.drain(None)
        except DeadlineError as error:
            log.warning("%s", error.message)
        except TierStoreError as error:
            log.debug("told with the others: %s", error.message)
        left = tuple(mover.pending())
        if not left:
            await tidy(await look_at_files(tiers), mover, clock)
        failed = [(item.put.path, tier, error) for item in taken.items for tier, error in item.failures.items()]
        failed += [(one.path, tier.name, error) for one, error in taken.unreadable for tier in one.targets]
        return FilesReport(lacking=tuple(lacking), left=left, failed=tuple(failed))
    finally:
        await mover.close()
