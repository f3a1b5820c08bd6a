"""Checkpoints that tierstore did not write, read where they lie: safetensors, torch.save and DCP."""
