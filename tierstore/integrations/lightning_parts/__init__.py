"""What the doors for ``lightning`` and ``pytorch_lightning`` share; neither is imported here."""
