"""The version of this package, which receipts keep."""

VERSION = "0.1.0"
