"""The doors for training frameworks; each module imports its framework, and none of them is imported here."""
