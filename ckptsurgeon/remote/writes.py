"""What changes the objects of one bucket: each request has a condition, where it can have one.

What a request did whose answer was lost is not known here: a caller that makes it again must take
an object that is as it should be for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from typing import Any
from urllib.parse import urlencode

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import again
from ckptsurgeon.plans.edits import Hole
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.remote import parts
from ckptsurgeon.remote.parts import Part, Range, Segment
from ckptsurgeon.remote.store import ATTEMPTS, CONNECTIONS, Store, broken_off

WHOLE = 5 << 30
"""Bytes of an object that a store copies by one request, at most."""
KEPT = (
    "CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType",
    "Metadata", "ServerSideEncryption", "SSEKMSKeyId", "StorageClass", "WebsiteRedirectLocation",
)  # fmt: skip
"""What is said of an object beside its bytes, and is said of the one that takes its place; so are
its tags."""


class Changed(SurgeryError):
    """The condition of a request does not hold: the object is another one by now, or there."""


@frozen
class Head:
    """What a store says of an object without its bytes; `kept` is said of one that replaces it."""

    size: int
    etag: str
    kept: Mapping[str, Any] = field(default_factory=dict)


@frozen
class Upload:
    """The parts of an object that is not there yet: `complete` makes it."""

    key: str
    id: str
    parts: tuple[tuple[int, str], ...]
    """Number and ETag of each."""


class Writes:
    """The objects of the bucket that `store` reads. Each error is a SurgeryError, as its are."""

    def __init__(self, store: Store) -> None:
        self.store, self.bucket = store, store.bucket

    def head(self, key: str) -> Head | None:
        """None where there is no such object."""
        try:
            found = self.store.client.head_object(Bucket=self.bucket, Key=key)
        except Exception as error:
            if _status(error) == 404:
                return None
            raise self._told(error, key) from None
        kept = {name: found[name] for name in KEPT if found.get(name)}
        if found.get("TagCount"):
            tags = self._ask("get_object_tagging", key)["TagSet"]
            kept["Tagging"] = urlencode([(tag["Key"], tag["Value"]) for tag in tags])
        return Head(found["ContentLength"], found["ETag"], kept)

    def read(self, key: str) -> tuple[bytes, Head, int] | None:
        """All bytes of a small object, and how many seconds ago it was written, by the store's own
        clock. None where there is no such object."""
        for attempt in range(ATTEMPTS):
            try:
                found = self.store.client.get_object(Bucket=self.bucket, Key=key)
                data = found["Body"].read()
                break
            except Exception as error:
                if _status(error) == 404:
                    return None
                if attempt == ATTEMPTS - 1 or not broken_off(error):
                    raise self._told(error, key) from None
        age = self.store.said_at(found) - found["LastModified"].timestamp()
        return data, Head(len(data), found["ETag"]), round(age)

    def bytes_of(self, range: Range) -> bytes:
        """The bytes of a range; none of another object than the one with its ETag."""
        if not range.size:
            return b""
        pieces = self.store.get(range.key, range.etag, range.start, range.end)
        return b"".join(data for _, data in pieces)

    def put(self, key: str, data: bytes, *, like: Head | None = None, match: str = "*new") -> None:
        """An object with these bytes in place of the one with the ETag `match`; as it is, a new
        one; of any with "". Raises Changed where that is not so."""
        condition = {"IfNoneMatch": "*"} if match == "*new" else {"IfMatch": match} if match else {}
        kept = like.kept if like else {}
        self._ask("put_object", key, Body=data, **kept, **condition)

    def delete(self, key: str) -> None:
        """No object has this key any more."""
        self._ask("delete_object", key)

    def copy(self, source: str, head: Head, key: str) -> None:
        """The object with the bytes of the one that `head` is of, and all that is said of it; in
        place of what has that key."""
        if head.size <= WHOLE:
            where = {"Bucket": self.bucket, "Key": source}
            self._ask("copy_object", key, CopySource=where, CopySourceIfMatch=head.etag)
            return
        self.complete(self.upload(key, [Range(source, head.etag, 0, head.size)], head))

    # --- in parts --------------------------------------------------------------------------------

    def begin(self, key: str, like: Head | None = None) -> Upload:
        """An upload without parts."""
        kept = like.kept if like else {}
        return Upload(key, str(self._ask("create_multipart_upload", key, **kept)["UploadId"]), ())

    def upload(self, key: str, segments: Sequence[Segment], like: Head | None = None) -> Upload:
        """All parts of an object that is made of these segments."""
        return self.fill(self.begin(key, like), segments)

    def fill(self, upload: Upload, segments: Sequence[Segment]) -> Upload:
        """The upload with all its parts, several of which are on their way at once."""
        cut = list(enumerate(parts.parts(segments), 1))
        with ThreadPoolExecutor(min(CONNECTIONS, len(cut))) as pool:
            etags = list(pool.map(lambda each: self._part(upload, *each), cut))
        numbers = (number for number, _ in cut)
        return Upload(upload.key, upload.id, tuple(zip(numbers, etags, strict=True)))

    def _part(self, upload: Upload, number: int, part: Part) -> str:
        about = {"UploadId": upload.id, "PartNumber": number}
        if (copied := part.copied) is not None:
            found = self._ask(
                "upload_part_copy", upload.key, **about,
                CopySource={"Bucket": self.bucket, "Key": copied.key},
                CopySourceRange=f"bytes={copied.start}-{copied.end - 1}",
                CopySourceIfMatch=copied.etag,
            )  # fmt: skip
            return str(found["CopyPartResult"]["ETag"])
        data = self.content(part.segments)
        return str(self._ask("upload_part", upload.key, **about, Body=data)["ETag"])

    def content(self, segments: Sequence[Segment]) -> bytes:
        """The bytes of a few segments."""
        return b"".join(
            self.bytes_of(each)
            if isinstance(each, Range)
            else bytes(each.size) if isinstance(each, Hole) else each
            for each in segments
        )  # fmt: skip

    def complete(self, upload: Upload, match: str = "") -> None:
        """The object is there, in place of the one with the ETag `match`. Raises Changed where
        there is another, or the upload is gone."""
        numbered = [{"PartNumber": number, "ETag": etag} for number, etag in upload.parts]
        condition = {"IfMatch": match} if match else {}
        self._ask(
            "complete_multipart_upload", upload.key, UploadId=upload.id,
            MultipartUpload={"Parts": numbered}, **condition,
        )  # fmt: skip

    def abort(self, key: str, id: str) -> None:
        """The parts of an upload go; nothing where it is complete, or gone."""
        with suppress(Changed):
            self._ask("abort_multipart_upload", key, UploadId=id)

    def empty_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and id of each upload below the prefix that has no part yet."""
        client = self.store.client
        try:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            begun = [
                (each["Key"], each["UploadId"]) for p in pages for each in p.get("Uploads", ())
            ]
        except Exception as error:
            raise self._told(error, prefix) from None
        return [each for each in begun if not self._has_parts(*each)]

    def _has_parts(self, key: str, id: str) -> bool:
        try:
            return bool(self._ask("list_parts", key, UploadId=id).get("Parts"))
        except Changed:  # it is gone by now
            return True

    def _ask(self, request: str, key: str, **about: Any) -> Any:
        try:
            return getattr(self.store.client, request)(Bucket=self.bucket, Key=key, **about)
        except Exception as error:
            raise self._told(error, key) from None

    def _told(self, error: Exception, key: str) -> SurgeryError:
        if _status(error) in (404, 409, 412):
            return Changed(f"s3://{self.bucket}/{key} changed meanwhile", next=again())
        return self.store.told(error, key)


def _status(error: Exception) -> int:
    answer: Any = getattr(error, "response", None)
    found = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
    return int(found.get("HTTPStatusCode", 0))
