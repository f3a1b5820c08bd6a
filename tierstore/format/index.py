"""The routing index: the one door to its modules (table, building, file, pages, coverage)."""

from __future__ import annotations

from tierstore.format.index_build import build_index, merge_indexes
from tierstore.format.index_coverage import check_coverage
from tierstore.format.index_file import IndexHead, decode_head, decode_index, encode_index, head_nbytes
from tierstore.format.index_paged import PagedIndex
from tierstore.format.index_table import Extent, ExtentTable, FileEntry, Index, RoutingIndex, TensorEntry

__all__ = [
    "Extent",
    "ExtentTable",
    "FileEntry",
    "Index",
    "IndexHead",
    "PagedIndex",
    "RoutingIndex",
    "TensorEntry",
    "build_index",
    "check_coverage",
    "decode_head",
    "decode_index",
    "encode_index",
    "head_nbytes",
    "merge_indexes",
]
