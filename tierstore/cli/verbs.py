"""The table of verbs: which module each is in, and what it does in one sentence, so that none is loaded before it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["VERBS"]

VERBS: Mapping[str, tuple[str, str]] = {
    "demo": ("demo_verb", "Train a small model through three tiers, kill it in mid-save, resume it; needs no configuration."),
    "ls": ("listing", "List checkpoints × tiers, with attempts that did not commit."),
    "show": (
        "look",
        "Show one checkpoint: its facts, files, replicas and log; also one that was deleted, where others still take bytes from it.",
    ),
    "tensors": ("look", "List a checkpoint's tensors: name, dtype, shape, bytes, shard."),
    "cat": ("look", "Write one file of a checkpoint to stdout, every byte proved against its digest."),
    "diff": ("compare", "Compare two checkpoints: tensors that changed, came or went, and objects. Reads digests only, unless --data."),
    "du": ("usage", "Show what takes the room: bytes of each checkpoint on each tier, by kind of file, and what will be freed."),
    "df": (
        "capacity",
        "Show how full each tier is: what this store holds there, what is free, and the limits at which retention makes room.",
    ),
    "verify": (
        "check",
        "Check what the tiers hold against its digests; notes damage in the log (-n: does not). --tier NAME checks one tier.",
    ),
    "repair": (
        "repair",
        "Mend what is damaged, block by block, from the tiers that have it good; deletes nothing. --tier NAME mends one tier.",
    ),
    "push": (
        "move",
        "Copy checkpoints to further tiers now, whatever else is pending; also where a copy was dropped. Returns when they are there.",
    ),
    "pull": (
        "move",
        "Copy checkpoints back to a nearer tier, every byte proved, so that the next load is fast; also where a copy was dropped.",
    ),
    "sync": ("work", "Work off everything pending: commit complete attempts, copy checkpoints to the tiers that lack them."),
    "status": ("status", "Show what each tier holds and lacks, how far it lags, the last errors, and what retention is at."),
    "recover": ("recover", "Commit complete attempts that nobody finished, and rebuild a lost log from the replicas; deletes nothing."),
    "plan": ("retain", "Show what retention would do to each checkpoint, and why. Changes nothing."),
    "prune": (
        "retain",
        "Decide by the policy which checkpoints go. They are hidden now, can be taken back for a while, and `gc` frees them after it.",
    ),
    "undelete": ("retain", "Take expired checkpoints back, as long as gc has not freed them."),
    "gc": ("freeing", "Free what was decided to go: expired checkpoints, copies that a tier's rules drop, what broken saves left behind."),
    "evict": ("freeing", "Drop checkpoints from one tier (--tier NAME) while others keep them. Never the last copy."),
    "explain": (
        "explain",
        "Say why a checkpoint stays or goes: every rule's word, its protections, each tier's copy, its log; or when and why it went.",
    ),
    "pin": ("labels", "Pin checkpoints: they are never deleted, until the pin is taken off. An expired one comes back."),
    "unpin": ("labels", "Take a pin off. Nothing is deleted now: from here on the rules decide."),
    "tag": ("labels", "Tag a checkpoint: REF@tag:TAG names it then, and rules can keep it. An expired one comes back."),
    "untag": ("labels", "Take tags off a checkpoint. Nothing is deleted now: from here on the rules decide."),
    "hold": ("labels", "Hold checkpoints: while it lasts they are neither deleted nor dropped from any tier."),
    "release": ("labels", "End a hold. Nothing is deleted now: from here on the rules decide."),
    "metrics": ("labels", "Add metrics that are known only now, such as an evaluation's; later values replace earlier ones."),
    "doctor": ("doctor", "Check configuration, tiers, capabilities and clocks; or try the contract on a storage of your own."),
    "export": ("export", "Export a checkpoint for other programs; reads only what is needed, in bounded memory."),
    "adopt": ("adopt", "Take in a foreign checkpoint; safetensors files are taken as they are. -n only shows what it would become."),
    "completion": (
        "completion",
        "Print the script that completes tierstore's verbs, options, tiers, runs and steps in a shell; or put it in its place.",
    ),
}
"""Verb → (its module in `tierstore.cli`, what the first paragraph of its function's docstring says), in the order of the help."""
