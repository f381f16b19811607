"""Profiles of real runs: times add up, the trace nests and overlaps, rows and bytes are counted,
the results stay, memory is bounded, and the simulator takes the file.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import trainingcxl as tcxl
from trainingcxl.cli import main
from trainingcxl.config import load_settings
from trainingcxl.errors import ConfigError
from trainingcxl.pool import Pool, inspect
from trainingcxl.profile import ProfileRequest
from trainingcxl.profile.measured import Span, exclusive_ns
from trainingcxl.sim import load_hardware
from trainingcxl.sim.profile import order_violations, project, read_profile
from trainingcxl.train import train
from trainingcxl.train_setup import Silent

ROWS, DIM = 4000, 8
SHAPE = {
    "name": "job",
    "batch": 1024,
    "interaction": "cat",
    "bottom": [1, DIM],
    "top": [512, 1],
    "table": [{"count": 1, "rows": ROWS, "lookups": 2, "dim": DIM}],
}


@pytest.fixture(autouse=True)
def restored_torch():
    """Undo what `prepare_torch` sets for the whole process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills


class Job:
    """A model over one table, wide enough that its loop takes some milliseconds a batch."""

    def __init__(self, pool: Pool, *, width: int = 512):
        self.pool = pool
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x", "y"]
        )
        self.bags = tcxl.EmbeddingBagCollection(
            pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(
            self.bags, nn.Linear(2 * DIM, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.run = tcxl.FaultTolerantRun(
            pool, self.model, self.dense, sparse_of=lambda ids: ids, dense_every=4
        )

    def loss(self, ids):
        return (self.model(ids) - 1.0).square().mean()

    def train(self, loader):
        for ids in self.run.batches(loader):
            self.run.step(self.loss(ids))


def batches(count, size=1024, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS, (size, 2), generator=generator) for _ in range(count)]


class List:
    """A loader with a place."""

    def __init__(self, items):
        self.items, self.first = items, 0

    def seek(self, epoch, batch):
        self.first = batch

    def __iter__(self):
        return iter(self.items[self.first :])


def train_once(path: Path, *options: str, profile: Path | None = None, kept: int = 100):
    settings = load_settings(
        assignments=[
            "data.source=synthetic:tiny?samples=6000",
            "run.batch_size=400",
            "run.threads=1",
            "run.device=cpu",
            "model.bottom=256",
            "model.top=256",
            "eval.fraction=0.2",
            f"pool.path={path}",
            *options,
        ]
    )
    request = None if profile is None else ProfileRequest(out=profile, batches=kept)
    train(settings, Silent(), Silent(), request)


# --- arithmetic


def test_exclusive_times_leave_out_what_is_inside():
    spans = [
        Span("dense_forward", "trainer", 1, 0, 100),
        Span("lookup", "trainer", 1, 20, 50),
        Span("sort", "trainer", 1, 30, 40),
        Span("commit", "trainer", 1, 100, 200),
        Span("update", "trainer", 1, 110, 190),
    ]
    found = exclusive_ns(spans, [{"log_share": 0.25, "reduce_share": 0.5}])
    assert found == {
        "dense_forward": 70,
        "lookup": 20,
        "sort": 10,
        "commit": 20,
        "update": 20,
        "log": 20,
        "reduce": 40,
    }
    assert sum(found.values()) == 200


def test_what_happens_in_an_evaluation_is_evaluation():
    spans = [Span("evaluation", "trainer", 1, 0, 100), Span("lookup", "trainer", 1, 20, 50)]
    assert exclusive_ns(spans, []) == {"evaluation": 100}


# --- a real run


def test_phases_add_up_to_the_step_by_another_clock(tmpfs_folder):
    """Three per cent of what a clock around the loop sees is all that may have no name."""
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool)
        job.train(List(batches(3)))  # what is created at first use is of no step
        loader = List(batches(40, size=4096, seed=2))
        job.run.epoch, job.run.batch = 1, 0
        with tcxl.Profile(job.run) as profile:
            began = time.perf_counter()
            job.train(loader)
            seconds = time.perf_counter() - began
    phases = dict(profile.totals.phases)
    assert profile.totals.batches == 40
    assert 1e-9 * sum(phases.values()) == pytest.approx(seconds, rel=0.03)
    named = sum(spent for name, spent in phases.items() if name != "loop")
    assert 1e-9 * named == pytest.approx(seconds, rel=0.03)
    for name in ("load", "announce", "lookup", "dense_forward", "loss", "dense_backward",
                 "dense_update", "prepare", "flag_wait", "reduce", "update", "commit"):  # fmt: skip
        assert phases[name] > 0, name
    for record in profile.kept:
        assert sum(record.phases.values()) == pytest.approx(record.end - record.begin, rel=1e-9)


def test_trace_has_true_times_and_nests(tmp_path, tmpfs_folder):
    out = tmp_path / "profile.json"
    with Pool(tmpfs_folder / "a.pool", threads=1, undo_log="background") as pool:
        job = Job(pool)
        before = time.perf_counter_ns()
        with tcxl.Profile(job.run, out) as profile:
            job.train(List(batches(12)))
            job.run.sync()
        after = time.perf_counter_ns()
    assert all(before <= span.begin <= span.end <= after for span in profile.spans)

    text = out.read_text()
    assert text.startswith('{"traceEvents":[')  # trace viewers stop at keys that they do not know
    events = json.loads(text)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["ts"] >= 0
            tracks[names[event["tid"]]].append(event)
    assert {"steps", "trainer", "log writer"} <= set(tracks)
    for of_one in tracks.values():
        ends = []
        for event in sorted(of_one, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-3  # within the one around it, or beside it
            ends.append(end)
    # The log of a batch is written before its update, beside the steps.
    written = {e["args"]["batch"]: e for e in tracks["log writer"] if e["name"] == "undo_log"}
    updates = {e["args"]["batch"]: e for e in tracks["trainer"] if e["name"] == "update"}
    both = set(written) & set(updates)
    assert len(both) >= 6
    for batch in both:
        assert written[batch]["ts"] + written[batch]["dur"] <= updates[batch]["ts"]
    assert {"dense_log", "sort"} <= {e["name"] for e in tracks["log writer"]}
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"share of rows", "bytes written"}


def test_relaxed_lookup_is_early_then_corrected(tmp_path, tmpfs_folder):
    """Batch N + 1 is pooled while N is in flight; its spans keep the paper's order."""
    out = tmp_path / "profile.json"
    pool = Pool(tmpfs_folder / "a.pool", threads=1, undo_log="background", lookup="relaxed")
    with pool:
        job = Job(pool)
        with tcxl.Profile(job.run, out, model=SHAPE) as profile:
            job.train(List(batches(10)))
    updates = {span.batch: span for span in profile.spans if span.phase == "update"}
    early = [s for s in profile.spans if s.phase in ("early_lookup", "early_wait")]
    assert {span.batch for span in early} >= set(range(3, 10))
    for span in early:
        assert span.batch - 1 not in updates or span.end <= updates[span.batch - 1].begin
    assert profile.totals.phases["correct"] > 0
    tree = json.loads(out.read_text())
    assert tree["system"] == "CXL"
    assert 0 < tree["rows"]["corrected_lookups_share"] < 1
    measured = read_profile(out)
    assert {name for _, name, _, _ in measured.spans} >= {"lookup", "correct", "dense", "update"}
    assert order_violations(measured, load_hardware()) == []


def test_rows_and_bytes_are_those_of_the_pool(tmpfs_folder):
    same = batches(1, size=300)[0]
    others = batches(2, size=300, seed=5)
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool)
        with tcxl.Profile(job.run) as profile:
            job.train(List([same, same, *others]))
        stats = job.run.stats
    first, second, third, _ = profile.kept
    distinct = len(same.unique())
    assert first.counts["rows"] == distinct
    assert first.counts["first_rows"] == distinct
    assert first.counts["recurring_rows"] == 0
    assert second.counts["recurring_rows"] == distinct
    assert second.counts["recurring_lookups"] == second.counts["lookups"] == same.numel()
    assert second.counts["first_rows"] == 0
    assert third.counts["recurring_rows"] == len(set(others[0].flatten().tolist())
                                                 & set(same.flatten().tolist()))  # fmt: skip
    totals = profile.totals.counts
    assert totals["rows"] == stats.rows
    assert totals["log_bytes"] == stats.log_bytes
    assert totals["lookup_bytes"] == 4 * same.numel() * DIM * 4
    assert totals["row_bytes"] == stats.rows * 4 * (DIM + 1)
    assert "distinct of 600 lookups" in profile.table()


def test_results_stay_and_nothing_is_left_behind(tmpfs_folder):
    digests = []
    for number in range(2):
        with Pool(tmpfs_folder / f"{number}.pool", threads=1) as pool:
            job = Job(pool)
            own = set(vars(job.run))
            if number == 0:
                job.train(List(batches(9)))
            else:
                with tcxl.Profile(job.run, batches=3) as profile:
                    job.train(List(batches(9)))
                assert profile.totals.batches == 9
                assert [record.batch for record in profile.kept] == [1, 2, 3]
                assert {span.batch for span in profile.spans if span.track == "trainer"} <= {
                    0, 1, 2, 3, 4,
                }  # fmt: skip
            assert set(vars(job.run)) == own
            assert not job.model._forward_hooks
            assert not job.model._forward_pre_hooks
            assert job.run._core.trace_take() == ([], [], 0)
            job.train(List(batches(12)))
            assert job.run._core.trace_take() == ([], [], 0)
            job.run.sync()
            digests.append(pool.digest())
    assert digests[0] == digests[1]


def test_loop_without_batches_is_cut_at_its_commits(tmpfs_folder):
    """Two lookups a commit, backward by hand, a phase of the loop's own, a skip."""
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool)
        with tcxl.Profile(job.run) as profile:
            for ids in batches(3):
                job.loss(ids).backward()
                job.loss(ids).backward()
                with profile.phase("augment"):
                    time.sleep(0.002)
                job.run.commit()
                job.dense.zero_grad()
            job.loss(batches(1)[0]).backward()
            job.run.skip()
    assert profile.totals.batches == 4
    assert profile.totals.phases["augment"] >= 3 * 2e6
    assert profile.totals.phases["dense_backward"] > 0
    assert profile.kept[0].counts["is_announced"] == 0
    assert profile.kept[0].counts["lookups"] == 2 * batches(1)[0].numel()
    assert profile.kept[3].counts["rows"] == 0
    assert "augment" in profile.table()


def test_journal_has_a_track_of_its_own(tmp_path):
    """Level power on an ordinary file: frames are written and synced beside the step."""
    with Pool(tmp_path / "a.pool", threads=1, durability="power", _medium="block") as pool:
        job = Job(pool)
        with tcxl.Profile(job.run) as profile:
            job.train(List(batches(10)))
            job.run.sync()
            job.run.skip()  # takes what came after the last batch
    background = profile.totals.background
    assert background["journal writer", "journal_write"] > 0
    assert background["journal writer", "journal_sync"] > 0
    assert profile.totals.counts["journal_bytes"] > profile.totals.counts["row_bytes"]
    assert "journal writer, journal_sync" in profile.table()


# --- the command


def test_command_writes_a_profile_that_the_simulator_takes(tmp_path):
    """From a measured run to a projection, with its own commands; in order, nothing unknown."""
    out, events = tmp_path / "profile.json", tmp_path / "events"
    options = [
        "--data", "synthetic:tiny?samples=6000", "--pool", str(tmp_path / "a.pool"),
        "--batch-size", "400", "--threads", "1", "--set", "model.bottom=256",
        "--set", "model.top=256", "--set", "pool.undo_log=background", "--json",
        "--profile", str(out), "--profile-batches", "6", "--tensorboard", str(events),
    ]  # fmt: skip
    result = CliRunner().invoke(main, ["train", *options])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    (said,) = [line for line in lines if line["event"] == "profile"]
    assert said == {"event": "profile", "batches": 14, "file": str(out)}
    assert list(events.glob("events.out.tfevents.*"))

    tree = json.loads(out.read_text())
    assert (tree["schema"], tree["batches"], len(tree["per_batch"])) == (1, 14, 6)
    assert tree["dropped_spans"] == 0
    step = tree["step"]
    assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=1e-6)
    assert step["phases"]["evaluation"] > 0
    assert tree["write_amplification"]["undo_log"] > 1
    assert tree["write_amplification"]["all"] > tree["write_amplification"]["rows_and_logs"] > 2

    profile, hardware = read_profile(out), load_hardware()
    assert order_violations(profile, hardware) == []
    assert {name for _, name, _, _ in profile.spans} == {"lookup", "dense", "log_rows", "update"}
    assert profile.model.lookups == 400 * 26
    assert profile.model.locality.unique_share == pytest.approx(
        tree["rows"]["distinct"] / tree["rows"]["lookups"]
    )
    assert 0 < profile.model.locality.reuse < 1
    found, refused = project(profile, hardware)
    assert refused == {}
    assert "distinct rows" in found[0].measured
    dense = next(p["seconds"] for p in tree["phases"] if p["name"] == "dense")
    work = found[0].result.work_s
    assert work["top MLP"] + work["bottom MLP"] == pytest.approx(dense)

    shown = CliRunner().invoke(main, ["simulate", "--from-profile", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "14 batches on medium" in shown.stdout
    assert "order violated" not in shown.stdout


def test_scalars_hold_the_phases(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Pool(tmp_path / "a.pool", threads=1) as pool:
        job = Job(pool)
        with tcxl.Profile(job.run, tensorboard=tmp_path / "events"):
            job.train(List(batches(5)))
    found = accumulator.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {"step/ms", "phase_ms/lookup", "bytes/log", "rows/recurring_share"} <= tags
    assert found.Scalars("step/ms")[-1].step == 5
    assert found.Scalars("step/ms")[-1].value > 0


def test_command_prints_a_table(tmp_path):
    options = ["--data", "synthetic:tiny?samples=300", "--pool", str(tmp_path / "a.pool")]
    small = ["--batch-size", "100", "--set", "model.bottom=8", "--set", "model.top=8"]
    out = ["--profile", str(tmp_path / "p.json")]
    result = CliRunner().invoke(main, ["train", *options, *small, *out])
    assert result.exit_code == 0, result.output
    for text in ("profile of 3 batches", "dense_backward", "bytes written", "recur from the"):
        assert text in result.output


def test_profiled_run_has_the_bits_of_one_without(tmp_path):
    train_once(tmp_path / "a.pool")
    train_once(tmp_path / "b.pool", profile=tmp_path / "p.json", kept=2)
    digests = [inspect(tmp_path / name, digest=True)["digest"] for name in ("a.pool", "b.pool")]
    assert digests[0] == digests[1]


# --- refusals


def test_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainingcxl\[tensorboard\]'"):
        ProfileRequest(tensorboard=tmp_path)


def test_places_that_cannot_be_written_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="which is no folder"):
        ProfileRequest(out=tmp_path / "nowhere" / "p.json")
    with pytest.raises(ConfigError, match="is a folder"):
        ProfileRequest(out=tmp_path)


def test_run_has_one_profile_at_a_time(tmpfs_folder):
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool, width=8)
        with tcxl.Profile(job.run), pytest.raises(ConfigError, match="a profile already"):
            tcxl.Profile(job.run)
        with pytest.raises(ConfigError, match="batches is -1"):
            tcxl.Profile(job.run, batches=-1)
        with tcxl.Profile(job.run) as empty:
            pass
        assert "no batch was committed" in empty.table()


def test_profile_without_a_model_says_what_the_simulator_needs(tmp_path, tmpfs_folder):
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool, width=8)
        with tcxl.Profile(job.run, tmp_path / "p.json"):
            job.train(List(batches(2)))
    shown = CliRunner().invoke(main, ["simulate", "--from-profile", str(tmp_path / "p.json")])
    assert shown.exit_code != 0
    assert "key 'model' is missing" in shown.output
    assert "Profile(..., model=)" in shown.output


def test_hook_is_on_whatever_the_model_gives(tmpfs_folder):
    """Outputs in a dict or a tuple, some without a gradient."""
    with Pool(tmpfs_folder / "a.pool", threads=1) as pool:
        job = Job(pool, width=8)
        run = job.run
        run.model.register_forward_hook(
            lambda _, __, out: {"other": out.detach(), "pair": (1, [out])}
        )
        with tcxl.Profile(run) as profile:
            for ids in run.batches(List(batches(2))):
                run.step(run.model(ids)["pair"][1][0].mean())
    assert profile.totals.phases["dense_backward"] > 0
    assert profile.kept[0].counts["rows"] > 0
