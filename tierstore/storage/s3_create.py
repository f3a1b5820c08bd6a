"""Create-if-absent on S3: a conditional PUT, and what to make of each way in which its answer can be lost (PROTOCOLS.md §3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, OutcomeUnknownError, StorageError, TemporaryError, TierStoreError
from tierstore.storage.s3_checksums import Checksums
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.s3_download import read_to_the_end
from tierstore.storage.s3_errors import Refusal, refusal, was_never_sent

__all__ = ["Creation"]


class Creation:
    """One attempt to make `key` with exactly `data`, which holds a nonce and is not empty."""

    def __init__(self, requests: S3Requests, key: str, data: bytes, checksums: Checksums) -> None:
        self._requests = requests
        self._key = key
        self._data = data
        self._checksums = checksums
        self._digest = checksums.document.of(memoryview(data))
        self._in_doubt: TierStoreError | None = None
        """Set when a request was sent whose answer was lost: it may have taken effect, or still may."""

    @property
    def _name(self) -> str:
        return self._requests.place.of(self._key)

    async def run(self) -> None:
        """Creates.

        Raises:
            ConflictError: Another one was first (``context["existing"]``: its bytes).
            OutcomeUnknownError: An answer was lost, and the name could not be read back.
        """
        try:
            await self._requests.retrying(self._attempt, self._requests.patience.attempts)
        except TemporaryError as error:
            if self._in_doubt is None:
                raise
            raise self._unknown() from error

    async def _attempt(self) -> None:
        carried = self._checksums.of(self._checksums.document, self._digest)
        try:
            answer = await self._requests.once(
                "creating",
                self._key,
                "put_object",
                body=memoryview(self._data),
                Key=self._key,
                IfNoneMatch="*",
                **carried,
            )
        except TierStoreError as error:
            lost = self._judge(error, carried)
        else:
            self._checksums.check(answer, self._checksums.document, self._digest, f"creating {self._name}")
            return
        existing = await self._existing()
        if existing == self._data:
            return  # an acknowledgement of our own write was lost
        if existing is not None:
            hint = "somebody else was first: read it, then decide"
            raise ConflictError(f"{self._name} exists already, with other bytes", hint=hint, existing=existing)
        raise TemporaryError(f"creating {self._name}: {lost.message}", hint="it is tried again") from lost

    def _judge(self, error: TierStoreError, carried: Mapping[str, Any]) -> TierStoreError:
        """Returns `error` if the name has to be read back to know; raises it if it was refused for good."""
        answer = refusal(error)
        if self._checksums.refused(error, carried):
            return error
        if isinstance(error, NotFoundError) or (answer is not None and not (answer.precondition_failed or answer.transient)):
            raise error
        if _may_take_effect(answer, error):
            self._in_doubt = error
        return error

    async def _existing(self) -> bytes | None:
        """The bytes under the name, or None if it is absent."""
        try:
            return bytes(await read_to_the_end(self._requests, self._key, 0))
        except NotFoundError as error:
            if error.context.get("code") == "NoSuchBucket":
                raise
            return None
        except (StorageError, IntegrityError) as error:
            if self._in_doubt is None:
                raise
            raise self._unknown() from error

    def _unknown(self) -> OutcomeUnknownError:
        reason = self._in_doubt.message if self._in_doubt else "its answer was lost"
        return OutcomeUnknownError(
            f"creating {self._name}: whether it was made is not known ({reason})",
            hint="read the name when the server answers again: it holds these bytes, or others, or none",
            key=self._key,
        )


def _may_take_effect(answer: Refusal | None, error: TierStoreError) -> bool:
    """Whether a failed PUT may have taken effect, or still may: no answer, or a server's own failure (but for "slow down")."""
    if answer is None:
        return not was_never_sent(error.__cause__ or error)
    return answer.status >= 500 and answer.status != 503
