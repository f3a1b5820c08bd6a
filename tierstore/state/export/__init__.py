"""Checkpoints written for other programs: Hugging Face directories, DCP directories and torch.save files."""
