"""``tierstore demo``: trains a small real model, kills it in mid-save, resumes it, and loads it once more from S3 alone."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import Counter
from pathlib import Path

from rich.text import Text

from tierstore import __version__
from tierstore.cli.demo_place import BUCKET, DemoPlace, describe_server
from tierstore.cli.demo_process import Tally, Trainee
from tierstore.cli.demo_report import Story, curve_verdict, digest_verdict, look_further, program_name, stall_table
from tierstore.cli.demo_spec import TrainSpec, train_command
from tierstore.cli.options import Cli
from tierstore.cli.render import catalog_legend, catalog_summary, catalog_table, checkpoint_value, facts_table, incomplete_value
from tierstore.config import load_config
from tierstore.errors import SaveError, UsageError
from tierstore.tiers.catalog import Catalog, scan
from tierstore.tiers.opening import rejoin
from tierstore.tiers.pending import pending
from tierstore.tiers.recover import recover
from tierstore.tiers.session import Session
from tierstore.units import format_duration, format_size

__all__ = ["run_demo"]

RUN = "demo"


def run_demo(cli: Cli, *, steps: int, directory: Path, keep: bool, serve: bool) -> int:
    """Runs the demo, or only its server; returns the exit code: 1 where the resumed training differs from the uninterrupted one."""
    if cli.options.config or cli.options.tier or cli.options.run:
        raise UsageError("the demo has a configuration of its own", hint="leave out -c, --tier and --run")
    place = DemoPlace(root=directory)
    if serve:
        with place.serve(again=True) as server:
            cli.terminal.say(f"{describe_server(server)} at {server.endpoint_url}; Ctrl-C ends it")
            _until_interrupted()
        return 0
    return _Demo(cli, place, steps).run(keep)


class _Demo:
    """One run of the demo: its chapters, in order, and what they measured."""

    def __init__(self, cli: Cli, place: DemoPlace, steps: int) -> None:
        self.cli = cli
        self.place = place
        self.story = Story(cli.terminal)
        self.steps = steps
        self.every = max(1, steps // 8)
        self.total = steps + self.every
        self.killed_at = 0
        self.ours = Tally()
        self.theirs = Tally()
        self.problems: list[str] = []

    def run(self, keep: bool) -> int:
        began = time.monotonic()
        cleared = self.place.prepare()
        with self.place.serve() as server:
            self.place.write_config(server, self.every)
            self._begin(describe_server(server), server.endpoint_url, cleared)
            self._train_and_kill()
            self._resume()
            self._compare()
            self._from_s3_alone()
            self._end(time.monotonic() - began, keep, serve_again=server.kind != "moto")
            if keep:
                _until_interrupted()
        return 1 if self.problems else 0

    # ---- the chapters

    def _begin(self, server: str, endpoint: str, cleared: bool) -> None:
        tell = self.story.tell
        tell(f"tierstore {__version__}, Python {platform.python_version()}, {os.cpu_count()} processors", "dim")
        self.story.chapter("Three tiers, nothing to configure")
        if cleared:
            tell("An earlier demo's files were removed.", "dim")
        root = self.place.root
        facts = [
            ("node", f"{root / 'node'}: stands for this machine's NVMe disk"),
            ("shared", f"{root / 'shared'}: stands for a parallel file system; decides what is committed"),
            ("object", f"s3://{BUCKET}/checkpoints at {endpoint}"),
            ("", server),
        ]
        self.cli.terminal.show(facts_table(facts))
        self.story.emit({"type": "tiers", "directory": str(root), "server": server, "endpoint": endpoint})

    def _train_and_kill(self) -> None:
        self.story.chapter("Train, save in the background, be killed in mid-save")
        half = max(2 * self.every, self.steps // 2)
        last_chance = (self.steps - 1) // self.every * self.every
        spec = self._spec(until=self.steps, stands_at=last_chance)  # so that it does not get past that while this process is held up
        begun, killed = 0, False
        with self._trainee(spec, "killed") as trainee, self.story.bar("training", 0, self.steps) as bar:
            for event in trainee.events():
                self.ours.note(event)
                kind = event["event"]
                if kind == "start":
                    self._describe_training(event)
                elif kind == "step":
                    bar.step(event["step"], event["loss"])
                elif kind == "saving":
                    begun = event["step"]
                elif kind == "level":
                    self._tell_save(event)
                elif kind == "closed":
                    killed = False  # too late
                if not killed and begun >= half and (kind == "save" or (kind == "level" and begun == last_chance)):
                    killed = any("committed" in levels for levels in self.ours.levels.values())
                    if killed:
                        trainee.kill()
            pid = trainee.pid
        self.killed_at = begun if killed else 0
        if not self.killed_at:
            raise SaveError("the training process ended before it could be killed", hint="give the demo more --steps")
        self.story.tell(
            f"SIGKILL to process {pid} while step {self.killed_at} was being saved",
            "bold red",
            event="killed",
            step=self.killed_at,
            pid=pid,
        )
        catalog = self._show_catalog()
        committed = catalog.find(self.killed_at)
        if committed is not None:
            self.story.tell(
                f"The kill came after the commit record of step {self.killed_at}: the checkpoint is whole, and only its copies are behind."
            )
        elif any(a.attempt.step == self.killed_at for a in catalog.incomplete):
            self.story.tell(f"Step {self.killed_at} has no commit record: no reader will take what is there for a checkpoint.")
        else:
            self.story.tell(f"Step {self.killed_at} left nothing that counts: it is no checkpoint, and no reader sees one.")

    def _resume(self) -> None:
        self.story.chapter("Resume from the newest committed checkpoint")
        resumed = self._continue("resumed", until=self.steps, digests=(self.steps,))
        if resumed == self.killed_at:
            self.story.tell(
                f"All parts of step {self.killed_at} had reached the node's disk: resuming finished its commit, nothing was lost."
            )
        elif resumed is None:
            self.story.tell("Nothing had been committed before the kill: training began anew.")
        else:
            self.story.tell(f"What came after step {resumed}, up to step {self.killed_at}, was computed a second time.")
        self._show_catalog()

    def _compare(self) -> None:
        self.story.chapter("The same training without interruption")
        spec = self._spec(until=self.total, config="", digests=(self.steps, self.total))
        with self._trainee(spec, "uninterrupted") as trainee, self.story.bar("training", 0, self.total) as bar:
            for event in trainee.events():
                self.theirs.note(event)
                if event["event"] == "step":
                    bar.step(event["step"], event["loss"])
        upto = Tally(losses={step: loss for step, loss in self.theirs.losses.items() if step <= self.steps}, digests=self.theirs.digests)
        self._judge_curve(upto)
        self._judge_digest(self.steps)
        self.story.table(stall_table(self.ours, self.theirs))
        committed = [levels["committed"] for levels in self.ours.levels.values() if "committed" in levels]
        remote = [levels["object"] for levels in self.ours.levels.values() if "object" in levels]
        if committed and remote:
            self.story.tell(
                f"Behind training's back a save took {_median(committed)} to be committed and {_median(remote)} to be on S3 too (medians).",
                event="background",
                committed_s=sorted(committed),
                object_s=sorted(remote),
            )
        self.story.emit(
            {"type": "stalls", "tierstore_s": self.ours.stall_s, "torch_save_s": self.theirs.stall_s, "step_s": self.ours.step_s}
        )

    def _from_s3_alone(self) -> None:
        self.story.chapter("Lose the node and the shared file system; resume from S3 alone")
        self.place.wipe_near_tiers()
        self.story.tell(f"Removed {self.place.root / 'node'} and {self.place.root / 'shared'}.", "bold red", event="wiped")
        self.story.tell(
            "With them went the log that decides what is committed. A disk that is only unmounted looks the same, so nothing can be saved "
            "until somebody says that it is lost: `tierstore recover` says so, and rebuilds all from the copies on S3."
        )
        self._recover()
        self._continue("from-s3", until=self.total, digests=(self.steps, self.total))
        self._judge_curve(self.theirs)
        self._judge_digest(self.steps)
        self._judge_digest(self.total)
        self._show_catalog()

    def _end(self, seconds: float, keep: bool, serve_again: bool) -> None:
        if self.problems:
            self.story.chapter("FAILED")
            for problem in self.problems[:10]:
                self.story.tell(problem, "bold red", event="problem")
        else:
            self.story.chapter("Look further")
        self.story.tell(f"Took {format_duration(round(seconds))}.", "dim", event="done", ok=not self.problems, seconds=seconds)
        if keep:
            self.story.tell("The S3 server stays up until Ctrl-C.")
        elif serve_again:
            self.story.tell("The demo's S3 server ends now; its data is kept.")
        else:
            self.story.tell(
                f"The demo's S3 server ends now, and what it held with it (moto): `{program_name()} demo --keep` leaves it running."
            )
        if not self.cli.terminal.as_json:
            self.cli.terminal.show("")
            for command, meaning in look_further(self.place.config, serving=keep, serve_again=serve_again):
                self.cli.terminal.show(Text(f"# {meaning}", style="dim"))
                self.cli.terminal.out.print(Text(f"  {command}"), soft_wrap=True)  # a line break inside would break copy and paste

    # ---- inside

    def _spec(self, *, until: int, config: str | None = None, digests: tuple[int, ...] = (), stands_at: int = 0) -> TrainSpec:
        return TrainSpec(
            config=str(self.place.config) if config is None else config,
            scratch=str(self.place.torch_save),
            until=until,
            every=self.every,
            total=self.total,
            seed=20,
            digests=digests,
            stands_at=stands_at,
        )

    def _trainee(self, spec: TrainSpec, name: str) -> Trainee:
        return Trainee(train_command(spec), self.place.logs / f"{name}.log")

    def _continue(self, name: str, *, until: int, digests: tuple[int, ...]) -> int | None:
        """Runs a process that resumes; returns the step that it resumed from."""
        resumed: int | None = None
        kinds: Counter[str] = Counter()
        with self._trainee(self._spec(until=until, digests=digests), name) as trainee, self.story.bar("training", 0, until) as bar:
            for event in trainee.events():
                self.ours.note(event)
                if event["event"] == "warning":
                    if event["kind"] not in kinds:  # one of each kind; the checkpoints' own are in the table
                        self.story.tell(f"  warning: {event['text']}", "yellow", event="warning")
                    kinds[event["kind"]] += 1
                elif event["event"] == "resumed":
                    resumed = event["step"]
                    took = format_duration(event["seconds"])
                    self.story.tell(f"Resumed from step {resumed} in {took}, every block proved by SHA-256.", event="resumed", step=resumed)
                elif event["event"] == "step":
                    bar.step(event["step"], event["loss"])
                elif event["event"] == "level":
                    self._tell_save(event)
        if more := kinds.total() - len(kinds):
            self.story.tell(f"  and {more} warnings like these, of other checkpoints or of a second look.", "yellow")
        return resumed

    def _recover(self) -> None:
        """What ``tierstore recover`` does."""
        with (
            self.cli.terminal.logging(quiet=True),
            Session.open(load_config(self.place.config), clock=self.cli.clock, lost="recover") as session,
        ):
            report = session.run(recover(session.tiers, RUN, clock=self.cli.clock))
            session.run(rejoin(session.tiers))
        self.problems += [f"Step {r.attempt.step} was not rebuilt: {r.error}" for r in report.rebuilt if r.error]
        sources = ", ".join(sorted({source for r in report.rebuilt for source in r.sources}))
        self.story.tell(
            f"{len(report.rebuilt)} checkpoints rebuilt from {sources}, {format_size(sum(r.nbytes for r in report.rebuilt))}.",
            event="recovered",
            steps=sorted(r.attempt.step for r in report.rebuilt),
            sources=sources,
        )

    def _describe_training(self, event: dict[str, object]) -> None:
        self.story.tell(
            f"A byte-level transformer of {event['parameters']} parameters reads Python's own library: bf16 weights, fp32 master "
            f"weights, AdamW; {self.steps} steps, a save every {self.every} (torch {event['torch']}, {event['threads']} thread)."
        )

    def _tell_save(self, event: dict[str, object]) -> None:
        """One line per save, when it has reached the last tier."""
        step = event["step"]
        assert isinstance(step, int)
        if event["level"] != "object":
            return
        levels = self.ours.levels[step]
        stall, committed, remote = (format_duration(levels[name]) for name in ("stall", "committed", "object"))
        self.story.tell(
            f"step {step:>4}   training waited {stall:>6}   committed after {committed:>6}   on S3 after {remote:>6}",
            event="saved",
            step=step,
            seconds=levels,
        )

    def _judge_curve(self, reference: Tally) -> None:
        compared, problems = curve_verdict(self.ours, reference)
        self.problems += problems
        if problems:
            self.story.tell(f"The loss curve differs in {len(problems)} places.", "bold red", event="curve", equal=False)
        else:
            last = max(reference.losses)
            text = f"Loss curve: all {compared} losses up to step {last} equal the uninterrupted run's to the last bit."
            self.story.tell(text, "bold green", event="curve", equal=True, compared=compared)

    def _judge_digest(self, step: int) -> None:
        digest, problems = digest_verdict(self.ours, self.theirs, step)
        self.problems += problems
        if problems:
            self.story.tell(f"Weights and moments differ after step {step}.", "bold red", event="digest", equal=False, step=step)
        else:
            text = f"Weights and moments after step {step}: bit-equal, SHA-256 {digest[:16]}…"
            self.story.tell(text, "bold green", event="digest", equal=True, step=step, sha256=digest)

    def _show_catalog(self) -> Catalog:
        # What its warnings say, the table says too.
        with (
            self.cli.terminal.logging(quiet=True),
            Session.open(load_config(self.place.config), clock=self.cli.clock, create=False) as session,
        ):
            catalog = session.run(scan(session.tiers, RUN))
            copies = pending(catalog, session.tiers)
        self.story.table(catalog_table(catalog, copies, self.cli.clock.now()), catalog_summary(catalog))
        legend = catalog_legend(catalog, copies)
        if legend is not None:
            self.cli.terminal.show(legend)
        for info in catalog.checkpoints:
            self.story.emit(checkpoint_value(info, copies))
        for found in (*catalog.incomplete, *catalog.condemned):
            self.story.emit(incomplete_value(found))
        return catalog


def _median(values: list[float]) -> str:
    return format_duration(sorted(values)[len(values) // 2])


def _until_interrupted() -> None:
    """Waits for Ctrl-C (or SIGTERM), which is then the ordinary end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return
