"""The version of this package, which receipts keep."""

VERSION = "1.0.0"
