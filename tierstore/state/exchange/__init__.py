"""Ranks that load together read each byte from afar once and send it to each other."""
