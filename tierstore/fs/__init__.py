"""The ``tier://`` file system for everything that speaks fsspec: files through the tiers, and a store's checkpoints as read-only folders.

The class is `tierstore.fs.filesystem.TierFileSystem`; fsspec finds it by the entry point ``tier``. What it may import from here it imports
from the modules: this package loads nothing by itself.
"""
