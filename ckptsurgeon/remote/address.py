"""Where a run lies that is not on a disk: s3://BUCKET/PREFIX."""

from __future__ import annotations

import re
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.plans.frozen import frozen

SCHEMES = "s3|gs|gcs|az|abfss?|r2|weka|msc|hf|oss|cos|https?|hdfs"
"""Where others keep checkpoints."""
URL = re.compile(rf"({SCHEMES}):(?:/+([^/]*)/*(.*))?", re.DOTALL)
"""Also as a path has it, which keeps one of two slashes, and none at its end."""


@frozen
class Address:
    """The objects of `bucket` below `prefix`, which has no slash at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def of(cls, typed: Path | str | None) -> Address | None:
        """The address in what was typed for a folder; None for one of a disk. Raises UsageError
        for a scheme that nothing here reads, and for an address without a bucket."""
        found = URL.fullmatch(str(typed)) if typed is not None else None
        if found is None:
            return None
        scheme, bucket, prefix = found.groups()
        if scheme != "s3":
            raise UsageError(
                f"{scheme}:// is not read, only s3://",
                next="copy the run to a disk, and name its folder there with -C",
            )
        if not bucket:
            raise UsageError("s3:// names no bucket", next="-C s3://BUCKET/PREFIX of the run")
        return cls(bucket, prefix.strip("/"))
