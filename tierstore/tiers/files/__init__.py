"""Any file through the tiers: what the ``tier://`` file system stands on (docs/design/protocol.md, Files). The door is `files.py`."""
