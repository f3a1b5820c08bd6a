"""The routing index: the one door to its modules (table, building, codec, coverage)."""

from __future__ import annotations

from tierstore.format.index_build import build_index, merge_indexes
from tierstore.format.index_codec import decode_index, encode_index
from tierstore.format.index_coverage import check_coverage
from tierstore.format.index_table import Extent, ExtentTable, FileEntry, Index, TensorEntry

__all__ = [
    "Extent",
    "ExtentTable",
    "FileEntry",
    "Index",
    "TensorEntry",
    "build_index",
    "check_coverage",
    "decode_index",
    "encode_index",
    "merge_indexes",
]
