"""Export: an open checkpoint becomes a Hugging Face directory, a DCP directory or a `torch.save` file, by range reads.

All that can be wrong with what was asked is found before the first byte is written; the files go through `storage.write`, which is
atomic; what makes a directory look whole (an index, ``.metadata``) comes last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tierstore.config_uris import normal_uri
from tierstore.errors import UsageError
from tierstore.format.objects import ObjectCodecs
from tierstore.state.codecs import default_codecs
from tierstore.state.export.config import companion_files, with_dtype
from tierstore.state.export.hf import plan_files, write_hf
from tierstore.state.export.plan import ExportOptions, Plan, plan_tensors
from tierstore.state.export.target import ExportedFile, ExportTarget
from tierstore.state.export.torch import load_tensors, torch_names, write_torch
from tierstore.state.export.tree import Path, beyond, check_one_model, flat_tree, in_order, sparse_parts
from tierstore.state.filling import without_omitted
from tierstore.state.load import read_tree
from tierstore.state.passthrough import companions_of, read_companion
from tierstore.state.reading import Reader, Run
from tierstore.state.unflatten import stored_tensors
from tierstore.storage.contract import Storage
from tierstore.storage.opening import open_storage

__all__ = ["ExportOptions", "Exported", "export_checkpoint"]

_CONCURRENCY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote, or with ``dry_run`` would write.

    Attributes:
        uri: Where it is.
        format: ``hf``, ``dcp`` or ``torch``.
        files: In the order of writing.
        tensors: How many tensors were written.
        nbytes: Bytes of all files.
        tied: Names that are not written because another name has the same tensor: name → the name that is written.
        left_out: Stored names that are not part of it.
        components: Sparse tensors that are written by their components, which the format has a place for: name → the stored names of these.
    """

    uri: str
    format: str
    files: tuple[ExportedFile, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    components: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Progress = Callable[[int, int], None]
"""Told how many bytes are made so far, and of how many; called on a thread of the export's."""


def export_checkpoint(
    reader: Reader,
    run: Run,
    to: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    codecs: ObjectCodecs | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Exported:
    """Exports an open checkpoint; every byte is proved by `Reader.read`.

    Args:
        reader: The open checkpoint: a `Replica`, or a foreign one's reader.
        run: Runs a coroutine on the event loop that `reader` lives on.
        to: A local path or URI: a directory, for ``torch`` a file.
        options: What and how; None: a Hugging Face directory of everything.
        storage_options: What the target's (and `config_from`'s) storage takes, e.g. ``endpoint_url``.
        codecs: Codecs for further types; None: torch's own.
        progress: Told how far it is.
        dry_run: Only plan; nothing is written.

    Raises:
        UsageError: The choice, the rules or the state don't fit the format; nothing was written.
        RefusedError: The target is not empty.
        NotFoundError: Nothing matches, or `config_from` has no files.
        IntegrityError: No tier has good bytes; what was written is removed.
    """
    return _Export(reader, run, options or ExportOptions(), storage_options, codecs or default_codecs(), progress, dry_run).export(to)


class _Export:
    def __init__(
        self,
        reader: Reader,
        run: Run,
        options: ExportOptions,
        storage_options: Mapping[str, Any] | None,
        codecs: ObjectCodecs,
        progress: Progress | None,
        dry_run: bool,
    ) -> None:
        self.reader = reader
        self.run = run
        self.options = options
        self.storage_options = storage_options
        self.codecs = codecs
        self.progress = progress
        self.dry_run = dry_run
        self.made = 0

    def export(self, to: str | os.PathLike[str]) -> Exported:
        text = normal_uri(to)
        tree = without_omitted(read_tree(self.reader, self.run, self.options.rank, 1))
        if self.options.format == "torch":
            return self.one_file(f"{text}/" if str(to).endswith("/") else text, tree)
        storage = self.open(text)
        try:
            with ExportTarget(storage, self.run, overwrite=self.options.overwrite) as target:
                return self.hugging_face(target, tree) if self.options.format == "hf" else self.dcp(target, tree)
        finally:
            self.run(storage.close())

    def open(self, uri: str) -> Storage:
        remote = "://" in uri and not uri.startswith(("file:", "local:"))
        return open_storage(uri, self.storage_options if remote else None, part_nbytes=8 << 20, concurrency=_CONCURRENCY)

    # ---- the formats

    def hugging_face(self, target: ExportTarget, tree: Any) -> Exported:
        if not self.options.selects:
            check_one_model(tree)
        names = self.options.choice.of(in_order(tree, self.reader.index))
        plan = plan_tensors(self.reader, names, self.options)
        files = plan_files(plan.tensors, self.options.shard_nbytes)
        target.check_empty()
        extra = self.companions()
        if self.dry_run:
            planned = [ExportedFile(name=f.name, nbytes=f.nbytes, tensors=len(f.tensors)) for f in files]
            planned += [ExportedFile(name=name, nbytes=len(data)) for name, data in extra]
            return self.told(target.uri, planned, plan, set(names.values()), tree)
        write_hf(target, self.reader, self.run, plan, self.options, extra, self.counter(sum(f.nbytes for f in files)))
        return self.told(target.uri, target.files, plan, set(names.values()), tree)

    def dcp(self, target: ExportTarget, tree: Any) -> Exported:
        from tierstore.state.export.dcp import write_dcp  # DCP takes a second to import, and only this format needs it

        flat = flat_tree(tree, self.reader.index, self.load, self.codecs)
        tensors = {**flat.tensors, **{name: name for name in beyond(tree, self.reader.index)}}
        picked = self.options.choice.of([*tensors, *flat.objects])
        names = {new: tensors[old] for new, old in picked.items() if old in tensors}
        plan = plan_tensors(self.reader, names, self.options)
        objects = {new: flat.objects[old] for new, old in picked.items() if old in flat.objects}
        if clash := sorted({*objects} & {t.name for t in plan.tensors}):
            raise UsageError(f"the rules give a tensor the name of the object {clash[0]!r}", hint="correct the rules", tensor=clash[0])
        paths = {new: _stripped(flat.paths.get(old, (old,)), self.options.strip, new) for new, old in picked.items()}
        inside = {t.name for t in stored_tensors(tree)} - set(flat.tensors.values())  # in tuples, say: part of an object
        known = {*picked.values(), *names.values(), *inside}
        target.check_empty()
        if self.dry_run:
            nbytes = sum(t.nbytes for t in plan.tensors)
            planned = [ExportedFile(name="__0_*.distcp", nbytes=nbytes, tensors=len(plan.tensors))]
            return self.told(target.uri, planned, plan, known, tree)
        counter = self.counter(sum(t.nbytes for t in plan.tensors))
        write_dcp(target, self.reader, self.run, plan, objects, paths, self.options, counter)
        return self.told(target.uri, target.files, plan, known, tree)

    def one_file(self, to: str, tree: Any) -> Exported:
        folder, _, name = to.rpartition("/")
        if not name:
            raise UsageError(f"{to!r} is a directory, and torch.save makes one file", hint=f"name it: {to}state.pt")
        names = torch_names(self.reader, tree, self.options)
        plan = plan_tensors(self.reader, names, replace(self.options, tied="copy"))
        storage = self.open(folder or ("/" if to.startswith("/") else "."))
        try:
            with ExportTarget(storage, self.run, overwrite=self.options.overwrite) as target:
                target.check_absent(name)
                files = [ExportedFile(name=name, nbytes=sum(t.nbytes for t in plan.tensors), tensors=len(plan.tensors))]
                if not self.dry_run:
                    write_torch(target, name, self.reader, self.run, tree, plan, self.options, self.codecs)
                    files = target.files
                known = set(names.values()) if self.options.selects else set(self.reader.index.names())
                return self.told(target.uri, files, plan, known, tree if self.options.selects else None)
        finally:
            self.run(storage.close())

    # ---- parts of them

    def load(self, names: set[str]) -> dict[str, torch.Tensor]:
        """The tensors that DCP stores inside an object."""
        plan = plan_tensors(self.reader, {n: n for n in sorted(names)}, replace(self.options, rules=None, tied="copy"))
        return load_tensors(self.reader, self.run, plan)

    def companions(self) -> list[tuple[str, bytes]]:
        if self.options.config_from is None:  # those that came with an adopted checkpoint
            found = [(name, read_companion(self.reader, self.run, one)) for name, one in companions_of(self.reader).items()]
        else:
            storage = self.open(self.options.config_from)
            try:
                found = companion_files(storage, self.run)
            finally:
                self.run(storage.close())
        return with_dtype(found, self.options.dtype) if self.options.dtype else found

    def counter(self, total: int) -> Callable[[int], None]:
        def count(nbytes: int) -> None:
            self.made += nbytes
            if self.progress is not None:
                self.progress(min(self.made, total), total)

        return count

    def told(self, uri: str, files: list[ExportedFile], plan: Plan, known: set[str], tree: Any) -> Exported:
        """`tree`: the sparse tensors that are written by their components; None: none are."""
        return Exported(
            uri=uri,
            format=self.options.format,
            files=tuple(files),
            tensors=len(plan.tensors),
            nbytes=sum(f.nbytes for f in files),
            tied=plan.tied,
            left_out=tuple(n for n in self.reader.index.names() if n not in known),
            components={name: parts for name, parts in sparse_parts(tree).items() if known.issuperset(parts)},
        )


def _stripped(path: Path, prefix: str, name: str) -> Path:
    """The path of a name that lost its prefix: without the keys that the prefix names, if it names whole ones."""
    for length in range(1, len(path)):
        if prefix == "".join(f"{key}." for key in path[:length]):
            return path[length:]
    return path if not prefix else (name,)
