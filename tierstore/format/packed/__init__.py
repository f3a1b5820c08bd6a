"""Packed files: a shard in fewer bytes, of which any block can be had by itself. `docs/design/format.md` has the format.

`types` (values and names), `layout` (what lies where in a raw file), `planes`, `frame` (one block), `footer` (the table of blocks).
"""
