"""What an S3 server or its client library said, as tierstore's errors: full names, a remedy, never credentials."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from aiohttp import ClientConnectorError
from aiohttp import ClientError as AiohttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSLError,
)

from tierstore.errors import (
    AccessError,
    ConfigError,
    DeadlineError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TemporaryError,
    TierFullError,
    TierStoreError,
)

__all__ = ["S3_FAILURES", "Place", "Refusal", "is_throttling", "no_bucket", "parse_http_date", "refusal", "translate", "was_never_sent"]

S3_FAILURES: tuple[type[Exception], ...] = (OSError, asyncio.TimeoutError, BotoCoreError, ClientError, AiohttpError, ValueError)
"""What s3fs, aiobotocore and aiohttp raise for a failed request (OSError: s3fs translates a server's answer into one)."""

_THROTTLED = {
    "SlowDown",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "503",
    "429",
}
_PASSING = {
    "InternalError",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
    "UnknownError",
    "500",
    "502",
    "504",
    "408",
    "409",
}
_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "AccountProblem",
    "ExpiredToken",
    "InvalidToken",
    "InvalidSecurity",
    "NotSignedUp",
    "403",
    "401",
}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch"}
_DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody", "ChecksumMismatch"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request went, for messages; holds no secret."""

    bucket: str
    endpoint: str
    """The endpoint's URL without user information; empty for AWS's own."""
    key_id: str
    """The access key's id, where the options name it."""

    def of(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A server's own answer to a request: it arrived, and was refused."""

    code: str
    status: int
    message: str
    date: str
    """The server's ``Date`` header."""

    @property
    def missing(self) -> bool:
        return self.code in ("NoSuchKey", "NoSuchUpload", "NoSuchVersion", "404") or (self.status == 404 and self.code != "NoSuchBucket")

    @property
    def precondition_failed(self) -> bool:
        return self.code in ("PreconditionFailed", "412") or self.status == 412

    @property
    def throttled(self) -> bool:
        """The server asks for fewer requests."""
        return self.code in _THROTTLED or self.status in (429, 503)

    @property
    def transient(self) -> bool:
        """May pass: throttling, a busy or restarting server, or bytes that were damaged on their way."""
        return self.code in _THROTTLED | _PASSING | _DAMAGED or (self.status >= 500 and self.status not in (501, 505, 507))


def refusal(error: BaseException) -> Refusal | None:
    """The server's answer that `error` stands for, or None if there was none.

    s3fs turns an answer into an `OSError` of some kind that differs from server to server (412 becomes EINVAL here and
    FileExistsError there), with botocore's error as its cause: the code is read from that, on every server.
    """
    found: BaseException | None = error
    seen: set[int] = set()  # a chain of causes may bite its own tail
    while found is not None and not isinstance(found, ClientError) and id(found) not in seen:
        seen.add(id(found))
        found = found.__cause__
    if not isinstance(found, ClientError):
        return None
    told: dict[str, Any] = found.response.get("Error", {})
    meta: dict[str, Any] = found.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode") or 0)
    return Refusal(
        code=str(told.get("Code") or status),
        status=status,
        message=str(told.get("Message") or ""),
        date=str((meta.get("HTTPHeaders") or {}).get("date") or ""),
    )


def is_throttling(error: BaseException) -> bool:
    """Whether `error`, ours or the client's, is a server's wish for fewer requests."""
    answer = refusal(error)
    return answer is not None and answer.throttled


def was_never_sent(error: BaseException) -> bool:
    """Whether the request certainly did not reach a server: no connection could be made."""
    if isinstance(error, ConnectTimeoutError):
        return True
    inner = getattr(error, "kwargs", {}).get("error") if isinstance(error, EndpointConnectionError) else None
    return isinstance(inner, ClientConnectorError)


def translate(error: BaseException, doing: str, key: str, place: Place, now: datetime) -> TierStoreError:
    """The tierstore error for `error`, raised while `doing` (a phrase: ``"reading"``) something to `key`.

    The result's `retryable` says whether the same request may succeed later.
    """
    if isinstance(error, TierStoreError):
        return error
    what = f"{doing} {place.of(key)}"
    context = {"bucket": place.bucket, "key": key}
    where = f"the S3 endpoint {place.endpoint}" if place.endpoint else "AWS S3"
    answer = refusal(error)
    if answer is not None:
        return _translate_refusal(answer, what, where, place, context, now)
    if isinstance(error, (ReadTimeoutError, asyncio.TimeoutError)):
        return DeadlineError(
            f"{what}: {where} gave no byte within the deadline",
            hint="check the server and the network, or raise stall_timeout_s",
            **context,
        )
    if isinstance(error, SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or "certificate verify failed" in str(error):
            return StorageError(
                f"{what}: the certificate of {where} can't be verified",
                hint="name your authority's file as client_kwargs: {verify: /path/ca.pem}",
                **context,
            )
        return TemporaryError(f"{what}: TLS to {where} failed", hint="it is tried again; check for a proxy if it stays", **context)
    if isinstance(error, (EndpointConnectionError, ConnectTimeoutError)) and was_never_sent(error):
        return TemporaryError(
            f"{what}: {where} does not answer", hint="check that the server runs, and endpoint_url in the tier's options", **context
        )
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return AccessError(
            f"{what}: no complete credentials were found",
            hint="set key and secret, or profile, in the options of the tier (--option profile=NAME for a URI that is none), "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            **context,
        )
    if isinstance(error, ProfileNotFound):
        return ConfigError(
            f"{what}: the AWS profile that the options name does not exist", hint="see ~/.aws/config, or AWS_CONFIG_FILE", **context
        )
    if isinstance(error, NoRegionError):
        return ConfigError(f"{what}: no region is known", hint="set region_name in the tier's options", **context)
    if isinstance(error, ParamValidationError) or (isinstance(error, ValueError) and not isinstance(error, BotoCoreError)):
        return ConfigError(
            f"{what}: the S3 client refuses the request ({type(error).__name__})",
            hint="check the bucket's name and endpoint_url, and that options have the types s3fs expects",
            **context,
        )
    if isinstance(error, (HTTPClientError, AiohttpError, ConnectionError, EndpointConnectionError)):
        return TemporaryError(f"{what}: the connection to {where} broke ({type(error).__name__})", hint="it is tried again", **context)
    return StorageError(f"{what}: failed ({type(error).__name__})", hint="see the cause in the log with --debug", **context)


def no_bucket(place: Place) -> NotFoundError:
    return NotFoundError(
        f"the bucket {place.bucket!r} does not exist on {place.endpoint or 'AWS S3'}",
        hint=f"make it (aws s3 mb s3://{place.bucket}), or correct the tier's URI",
        bucket=place.bucket,
        code="NoSuchBucket",
    )


def _translate_refusal(answer: Refusal, what: str, where: str, place: Place, context: dict[str, str], now: datetime) -> TierStoreError:
    code = answer.code
    context = {**context, "code": code}
    if code == "NoSuchBucket":
        return no_bucket(place)
    if answer.missing:
        return NotFoundError(f"{what}: there is no such object", hint="it was deleted, or never written", **context)
    if code in ("RequestTimeTooSkewed", "RequestExpired"):
        return AccessError(
            f"{what}: {where} refuses this machine's clock{_skew(answer.date, now)}", hint="set the clock (NTP), then try again", **context
        )
    if code in _WRONG_KEYS:
        who = f" {place.key_id!r}" if place.key_id else ""
        why = "does not know the access key" if code == "InvalidAccessKeyId" else "does not accept the secret of the access key"
        return AccessError(
            f"{what}: {where} {why}{who}", hint="correct the credentials in the tier's options, profile or environment", **context
        )
    if code in _DENIED or answer.status in (401, 403):
        who = f" to access key {place.key_id!r}" if place.key_id else ""
        return AccessError(f"{what}: {where} denies it{who} ({code})", hint="check the credentials and the bucket's policy", **context)
    if answer.throttled:
        return TemporaryError(
            f"{what}: {where} asks to slow down ({code})", hint="lower max_bandwidth or the concurrency, or wait", **context
        )
    if code in _FULL or answer.status == 507:
        return TierFullError(f"{what}: {where} has no space left ({code})", hint="free space or raise the quota", **context)
    if code in _DAMAGED:
        return IntegrityError(f"{what}: the bytes were damaged on their way ({code})", hint="check the network and its proxies", **context)
    if answer.transient:
        return TemporaryError(f"{what}: {where} failed ({code})", hint="it is tried again; see the server's log if it stays", **context)
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException") or answer.status == 301:
        return ConfigError(f"{what}: the bucket lives in another region ({code})", hint="set region_name in the tier's options", **context)
    if code == "NotImplemented" or answer.status == 501:
        return StorageError(f"{what}: {where} can't do this ({code})", hint="`tierstore doctor --probe URI` says what it can do", **context)
    return StorageError(f"{what}: {where} refused it ({code}, HTTP {answer.status})", hint="see the server's log", **context)


def _skew(date: str, now: datetime) -> str:
    """``", which is 1234 s ahead of it"`` where the server said its time."""
    theirs = parse_http_date(date)
    if theirs is None:
        return ""
    seconds = (now - theirs).total_seconds()
    return f", which is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} its own"


def parse_http_date(text: str) -> datetime | None:
    """The aware time of a ``Date`` header; None where there is none, or it is no date."""
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=timezone.utc)
