"""The objects of one bucket, as boto3 reads them: with its credentials, endpoint and retries.

No error of it is passed on as it is: a server may put anything into its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Hint, again, shell
from ckptsurgeon.plans.frozen import frozen

CONNECTIONS = 16
"""Requests under way at once, at most."""
CONNECT_S, READ_S = 10, 60
"""Seconds in which a server must accept a connection, and send the next bytes."""
ATTEMPTS = 5
"""How often the rest of a body is asked for that ends early; boto3 tries a request as often."""
PIECE = 1 << 20
CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
NEXT: dict[str, Hint] = {
    "NoSuchBucket": "check the name of the bucket, and AWS_ENDPOINT_URL",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID, or AWS_PROFILE",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "ExpiredToken": "get new credentials, then run the same command again",
    "AccessDenied": "docs/remote.md says which permissions the credentials need",
    "InvalidObjectState": "restore the object from its archive first",
}
"""What helps, by the code of the server."""


@frozen
class Object:
    """One object as a listing has it."""

    key: str
    size: int
    etag: str
    modified_ns: int


class Store:
    """A bucket. Each error is a SurgeryError that names the object and what the server said, by its
    code alone."""

    def __init__(self, bucket: str) -> None:
        """Raises UsageError where boto3 is not installed, or takes no such settings."""
        try:
            from boto3.session import Session
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise UsageError(
                "s3:// needs boto3, which is not installed",
                next=shell(["pip", "install", "ckptsurgeon[s3]"]),
            ) from None
        self.bucket = bucket
        config = Config(
            max_pool_connections=CONNECTIONS, connect_timeout=CONNECT_S, read_timeout=READ_S
        )
        try:
            self.client: Any = Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(
                f"s3://{bucket}: boto3 takes none of these settings: {type(error).__name__}",
                next="check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL",
            ) from None

        self.now = 0.0
        """When the store made its last page of a listing, by its own clock."""

    @staticmethod
    def said_at(answer: Mapping[str, Any]) -> float:
        """When the store gave this answer, by its own clock."""
        from email.utils import parsedate_to_datetime

        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        return parsedate_to_datetime(str(headers["date"])).timestamp()

    @property
    def endpoint(self) -> str:
        """The server, without what may be secret in its address."""
        parts = urlsplit(str(self.client.meta.endpoint_url))
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def list(self, prefix: str) -> Iterator[Object]:
        """Every object whose key begins so, in the order of the server."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=prefix
        )
        try:
            for page in pages:
                self.now = self.said_at(page)
                for item in page.get("Contents", ()):
                    moment = int(item["LastModified"].timestamp() * 1_000_000) * 1000
                    yield Object(item["Key"], item["Size"], item["ETag"], moment)
        except Exception as error:
            raise self.told(error, prefix) from None

    def get(self, key: str, etag: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The bytes [start, end) as (offset, some of them), of the object with this ETag. Raises
        SurgeryError for another one."""
        for attempt in range(ATTEMPTS):
            try:
                answer = self.client.get_object(
                    Bucket=self.bucket, Key=key, IfMatch=etag, Range=f"bytes={start}-{end - 1}"
                )
                for data in answer["Body"].iter_chunks(PIECE):
                    yield start, data
                    start += len(data)
                if start >= end:
                    return
            except Exception as error:
                if attempt == ATTEMPTS - 1 or not broken_off(error):
                    raise self.told(error, key) from None
        raise SurgeryError(
            f"s3://{self.bucket}/{key} ends at byte {start}, {end - start} before its end",
            next=again(why="its server sends fewer bytes than it says"),
        )

    def told(self, error: Exception, key: str) -> SurgeryError:
        """The error in three lines; of the server's own text only its code."""
        from botocore import exceptions as known

        where = f"s3://{self.bucket}/{key}"
        if isinstance(error, known.ClientError):
            answer = error.response
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(answer.get("Error", {}).get("Code", ""))
            code = code if CODE.fullmatch(code) else "an error without a code"
            if status == 412 or (status == 404 and code in ("NoSuchKey", "404")):
                return SurgeryError(f"{where} changed while it was read", next=again())
            usual = NEXT["AccessDenied"] if status == 403 else again(why="once the server is well")
            what = f"{where}: {self.endpoint} says {code} ({status})"
            return SurgeryError(what, next=NEXT.get(code, usual))
        name = type(error).__name__
        if isinstance(error, (known.NoCredentialsError, known.PartialCredentialsError)):
            return SurgeryError(
                f"{where}: boto3 finds no credentials",
                next="set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        if isinstance(error, known.ParamValidationError):
            return UsageError(f"{where}: no bucket has such a name", next="-C s3://BUCKET/PREFIX")
        if isinstance(error, known.SSLError):
            return SurgeryError(
                f"{where}: no TLS with {self.endpoint}: its certificate can't be verified",
                next="AWS_CA_BUNDLE=FILE names the certificates to trust",
            )
        if isinstance(error, (known.BotoCoreError, OSError)) or broken_off(error):
            return SurgeryError(
                f"{where}: {self.endpoint} does not answer: {name}",
                next=again(why="once the server can be reached; AWS_ENDPOINT_URL names it"),
            )
        raise error


def broken_off(error: Exception) -> bool:
    """Whether a body ended early: its rest can be asked for."""
    from botocore import exceptions as known

    kinds = (
        known.ReadTimeoutError,
        known.IncompleteReadError,
        known.ResponseStreamingError,
        known.ConnectionClosedError,
    )
    return isinstance(error, kinds)
