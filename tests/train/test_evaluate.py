"""`trainingcxl evaluate` and `predict`: the model in a pool, without the program and unchanged.

A user would judge another model than the one that was trained, or harm the pool by looking at it.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from click.testing import CliRunner, Result

import trainingcxl as tcxl
from trainingcxl.cli import main
from trainingcxl.data import open_data
from trainingcxl.metrics import auc
from trainingcxl.pool import Pool

SMALL = [
    "run.batch_size=32",
    "run.threads=1",
    "run.device=cpu",
    "model.bottom=16",
    "model.top=16",
    "model.embedding_dim=4",
    "eval.fraction=0.2",
]
SYNTHETIC = "data.source=synthetic:tiny?samples=1200"
METRICS = ("num_samples", "click_rate", "auc", "log_loss", "normalized_entropy", "calibration")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def events(*arguments: object) -> dict[str, dict[str, Any]]:
    """Run a command that succeeds and return its last event of each name."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return {event["event"]: event for event in map(json.loads, result.stdout.splitlines())}


def train(pool: Path, *assignments: str) -> dict[str, dict[str, Any]]:
    settings = [*SMALL, f"pool.path={pool}", *assignments]
    return events("train", *(part for text in settings for part in ("--set", text)))


def refusal(*arguments: object, code: int = 2) -> str:
    """Run a command that is refused and return what it says."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "\n  do:    " in result.stderr
    return result.stderr


def metrics(event: dict[str, Any]) -> dict[str, Any]:
    return {name: event[name] for name in METRICS}


def traces(pool: Path) -> dict[str, tuple[int, str]]:
    """Time of change and hash of the pool and all that is in it."""
    found = {str(pool): (pool.stat().st_mtime_ns, "")}
    for path in sorted(pool.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = path.stat().st_mtime_ns, hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished pool on built-in data, and what its training said at the end."""
    pool = tmp_path_factory.mktemp("trained") / "a.pool"
    return pool, train(pool, SYNTHETIC)["result"]


def csv_file(path: Path, count: int, *, seed: int, users: int = 50, label: bool = True) -> Path:
    draw = np.random.default_rng(seed)
    lines = [",".join([*(["click"] if label else []), "age", "user", "site"])]
    for _ in range(count):
        user, site = int(draw.integers(users)), int(draw.integers(7))
        click = int(draw.random() < 0.2 + 0.6 * (user % 2))
        values = [*([click] if label else []), int(draw.integers(90)), f"u{user}", f"s{site}"]
        lines.append(",".join(map(str, values)))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def on_csv(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished pool on a text table with a guessed schema, which is written beside it."""
    folder = tmp_path_factory.mktemp("on-csv")
    data = csv_file(folder / "train.csv", 800, seed=1)
    result = train(folder / "a.pool", f"data.source=csv:{data}")["result"]
    assert invoke("schema", data, "--output", folder / "schema.toml").exit_code == 0
    return folder / "a.pool", result


# --- the same figures -----------------------------------------------------------------------------


def test_finished_pool_is_judged_as_at_the_end_of_its_training(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    pool, result = trained
    before = traces(pool)
    found = events("evaluate", pool)["result"]
    assert metrics(found) == metrics(result)
    assert (found["part"], found["batch"], found["finished"]) == ("held out", 30, True)
    assert traces(pool) == before


def test_random_split_and_converted_text_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = csv_file(tmp_path / "train.csv", 700, seed=2)
    settings = [f"data.source=csv:{data}", "eval.split=random", "run.seed=3", "run.epochs=2"]
    result = train(tmp_path / "a.pool", *settings)["result"]
    before = traces(tmp_path / "a.pool")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    converted = []
    monkeypatch.setattr("trainingcxl.data.tabular._Conversion.run", converted.append)
    found = events("evaluate", tmp_path / "a.pool")
    assert metrics(found["result"]) == metrics(result)
    assert converted == []  # the pool's own conversion was taken
    assert traces(tmp_path / "a.pool") == before
    assert list(folder.iterdir()) == []


@pytest.mark.samples
def test_several_ids_and_no_numbers(tmp_path: Path, samples: Path) -> None:
    """MovieLens: genres are any number of ids, and there is no dense column."""
    source = f"data.source=movielens:{samples / 'movielens-100k'}"
    result = train(tmp_path / "a.pool", source, "run.batch_size=4096")["result"]
    assert metrics(events("evaluate", tmp_path / "a.pool")["result"]) == metrics(result)


def test_all_rows_of_other_data(trained: tuple[Path, dict[str, Any]]) -> None:
    pool, result = trained
    found = events("evaluate", pool, "--data", "synthetic:tiny?samples=900&seed=1")["result"]
    assert (found["part"], found["num_samples"]) == ("all", 900)
    again = events("evaluate", pool, "--data", "synthetic:tiny?samples=1200")
    assert again["result"]["num_samples"] == 1200
    assert "--held-out takes only" in again["notice"]["text"]
    moved = events("evaluate", pool, "--data", "synthetic:tiny?samples=1200", "--held-out")
    assert metrics(moved["result"]) == metrics(result)
    assert "nothing of it was held out" in refusal(
        "evaluate", pool, "--data", "synthetic:tiny?samples=900", "--held-out"
    )


def test_text_for_the_eye_has_the_figures_on_standard_output(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    pool, result = trained
    shown = invoke("evaluate", pool)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"result pool={pool} batch=30 ")
    assert f" auc={result['auc']:.6g} " in shown.stdout


# --- scores ---------------------------------------------------------------------------------------


def test_scores_give_the_same_auc_and_name_their_rows(tmp_path: Path) -> None:
    train(tmp_path / "a.pool", SYNTHETIC, "eval.split=random")
    expected = events("evaluate", tmp_path / "a.pool")["result"]
    out = tmp_path / "scores.parquet"
    found = events("predict", tmp_path / "a.pool", "--out", out)["result"]
    assert found["num_samples"] == 240
    frame = polars.read_parquet(out)
    assert frame.columns == ["row", "score", "label"]
    assert frame["score"].is_between(0, 1).all()
    assert auc(frame["label"].to_numpy(), frame["score"].to_numpy()) == expected["auc"]
    data = open_data("synthetic:tiny?samples=1200")
    rows = frame["row"].to_numpy()
    assert len(set(rows.tolist())) == 240
    assert np.array_equal(data.read(rows).label, frame["label"].to_numpy())
    assert not np.array_equal(rows, np.sort(rows))  # of a random split, in its order


def test_rows_of_given_data_are_numbered_from_zero(
    tmp_path: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    pool, _ = trained
    before = traces(pool)
    out = tmp_path / "scores.parquet"
    events("predict", pool, "--data", "synthetic:tiny?samples=9000", "--out", out)
    assert polars.read_parquet(out)["row"].to_list() == list(range(9000))  # two batches
    assert traces(pool) == before


def test_data_without_labels_is_scored_and_not_judged(
    tmp_path: Path, on_csv: tuple[Path, dict[str, Any]]
) -> None:
    """The file lacks the column that the schema calls the label; all else is read alike."""
    pool, _ = on_csv
    with_labels = csv_file(tmp_path / "with.csv", 300, seed=5)
    without = csv_file(tmp_path / "without.csv", 300, seed=5)
    lines = with_labels.read_text().splitlines()
    without.write_text("\n".join(line.partition(",")[2] for line in lines) + "\n")
    schema = f"data.schema={pool.parent / 'schema.toml'}"
    frames = []
    for data in (with_labels, without):
        out = data.with_suffix(".parquet")
        events("predict", pool, "--data", f"csv:{data}", "--set", schema, "--out", out)
        frames.append(polars.read_parquet(out))
    assert frames[0].columns == ["row", "score", "label"]
    assert frames[1].columns == ["row", "score"]
    assert frames[0]["score"].equals(frames[1]["score"])
    said = refusal("evaluate", pool, "--data", f"csv:{without}", "--set", schema, code=1)
    assert "has no column 'click'" in said
    judged = events("evaluate", pool, "--data", f"csv:{with_labels}", "--set", schema)["result"]
    assert judged["auc"] > 0.6  # the odd users click: the rows are those of the training


def test_another_schema_is_refused(tmp_path: Path, on_csv: tuple[Path, dict[str, Any]]) -> None:
    """Ids hashed to another number of rows would score each user as somebody else."""
    pool, _ = on_csv
    text = (pool.parent / "schema.toml").read_text()
    other = tmp_path / "other.toml"
    assert "rows = " in text
    other.write_text(re.sub(r"rows = \d+", "rows = 17", text))
    data = csv_file(tmp_path / "more.csv", 100, seed=6)
    said = refusal(
        "evaluate", pool, "--data", f"csv:{data}", "--set", f"data.schema={other}", code=1
    )
    assert "is read by another schema" in said
    assert "--set data.schema=FILE" in said


def test_ids_beyond_a_table_are_refused_or_wrapped(tmp_path: Path) -> None:
    def table(path: Path, first: int, count: int) -> Path:
        lines = [f"{i % 2},{i % 9},{first + i % 40}" for i in range(count)]
        path.write_text("click,age,user_id\n" + "\n".join(lines) + "\n")
        return path

    schema = tmp_path / "schema.toml"
    schema.write_text(
        '[label]\ncolumn = "click"\n[[dense]]\ncolumn = "age"\n'
        '[[sparse]]\ncolumn = "user_id"\nkind = "id"\n'
    )
    data = table(tmp_path / "train.csv", 0, 400)
    pool = tmp_path / "a.pool"
    train(pool, f"data.source=csv:{data}", f"data.schema={schema}")
    beyond = f"csv:{table(tmp_path / 'beyond.csv', 40, 90)}"  # users 40 .. 79 of 40
    said = refusal("evaluate", pool, "--data", beyond, code=1)
    assert "feature 'user_id' has ids up to 79" in said
    assert "has 40 rows" in said
    assert "--wrap-ids" in said
    wrapped = events("evaluate", pool, "--data", beyond, "--wrap-ids")
    assert wrapped["wrapped"]["features"] == "user_id"
    within = events("evaluate", pool, "--data", f"csv:{table(tmp_path / 'within.csv', 0, 90)}")
    assert metrics(wrapped["result"]) == metrics(within["result"])


def test_conversions_of_new_data_go_elsewhere(
    tmp_path: Path, on_csv: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = on_csv
    before = traces(pool)
    temporary, kept = tmp_path / "temporary", tmp_path / "kept"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    data = csv_file(tmp_path / "more.csv", 200, seed=7)
    options = ("--data", f"csv:{data}", "--set", f"data.schema={pool.parent / 'schema.toml'}")
    first = events("evaluate", pool, *options)["result"]
    second = events("evaluate", pool, *options, "--set", f"cache.dir={kept}")["result"]
    assert metrics(first) == metrics(second)
    assert list(temporary.iterdir()) == []
    assert len(list(kept.glob("*/meta.json"))) == 1
    assert traces(pool) == before
    said = refusal("evaluate", pool, *options, "--set", f"cache.dir={pool / 'cache'}")
    assert "inside pool" in said


def test_bad_line_is_the_error_of_training(
    tmp_path: Path, on_csv: tuple[Path, dict[str, Any]]
) -> None:
    pool, _ = on_csv
    data = csv_file(tmp_path / "bad.csv", 50, seed=8)
    data.write_text(data.read_text() + "2,3,u1,s1\n")
    options = ("--data", f"csv:{data}", "--set", f"data.schema={pool.parent / 'schema.toml'}")
    result = invoke("evaluate", pool, *options)
    assert result.exit_code == 1
    assert "bad.csv, line 52: label click is '2', expected 0 or 1" in result.stderr
    allowed = events("evaluate", pool, *options, "--set", "data.max_bad_lines=1")
    assert allowed["result"]["num_samples"] == 50
    assert "line 52" in allowed["bad_line"]["line"]


# --- pools in other states ------------------------------------------------------------------------


def test_pool_that_died_in_mid_transaction_is_judged_as_recovered_and_stays_as_it_is(
    tmp_path: Path,
) -> None:
    """SIGKILL between two row updates: the flag of the batch is set, some of its rows are new.

    Reading those rows as they are would judge a model that never was. The undo log gives them back,
    in private memory; the pool's next training must still find what the kill left.
    """
    pool = tmp_path / "killed.pool"
    program = (
        "import sys\n"
        "from trainingcxl import _core\n"
        "from trainingcxl.config import load_settings\n"
        "from trainingcxl.train import train\n"
        "from trainingcxl.train_setup import Silent\n"
        "_core.kill_at_persist(12, 'commit: rows stored')\n"
        "train(load_settings(assignments=sys.argv[1:]), Silent(), Silent())\n"
    )
    settings = [*SMALL, f"pool.path={pool}", SYNTHETIC, "run.dense_every=5"]
    died = subprocess.run([sys.executable, "-c", program, *settings], capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    recovered = tmp_path / "recovered.pool"
    shutil.copytree(pool, recovered)
    before = traces(pool)
    found = events("evaluate", pool)
    assert found["recovery"]["rows_rolled_back"] > 0
    assert found["recovery"]["committed_batch"] == 11
    assert not found["result"]["finished"]
    assert traces(pool) == before
    with Pool(recovered, threads=1) as opened:
        assert opened.committed_batch == found["result"]["batch"] < 12
        assert opened.recovery is not None
        assert opened.recovery.rows_changed > 0  # some rows were those of the batch in flight
    assert metrics(events("evaluate", recovered)["result"]) == metrics(found["result"])
    latest = events("evaluate", pool, "--set", "pool.resume=latest")["result"]
    assert latest["batch"] == 11
    assert traces(pool) == before


def test_pool_in_use_is_refused_with_its_owner_and_the_way_out(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    pool, _ = trained
    with Pool(pool, threads=1):
        said = refusal("evaluate", pool, code=1)
    assert f"in use by process {os.getpid()}" in said
    assert "trainingcxl snapshot" in said


def test_pool_of_another_program_is_refused_with_what_to_do_there(tmp_path: Path) -> None:
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"]
    )

    def model(pool: Pool) -> torch.nn.Module:
        bags = tcxl.EmbeddingBagCollection(
            pool, tables=[config], optimizer=None if pool.is_read_only else tcxl.optim.SGD(lr=0.1)
        )
        return torch.nn.Sequential(bags, torch.nn.Linear(4, 1))

    ids = torch.tensor([[3], [4]])
    with Pool(tmp_path / "a.pool", threads=1) as pool:
        mine = model(pool)
        run = tcxl.FaultTolerantRun(pool, mine)
        run.step(mine(ids).sum())
        with torch.no_grad():  # else a step has begun, and closing leaves its dense part out
            expected = mine(ids)
    before = traces(tmp_path / "a.pool")
    said = refusal("evaluate", tmp_path / "a.pool", code=1)
    assert "was not trained by 'trainingcxl train'" in said
    assert "tcxl.FaultTolerantRun(pool, model)" in said
    with Pool(tmp_path / "a.pool", read_only=True) as pool:  # what the message says
        mine = model(pool)
        tcxl.FaultTolerantRun(pool, mine)
        assert torch.equal(mine.eval()(ids), expected)
    assert traces(tmp_path / "a.pool") == before


def test_pool_without_a_training_is_refused(tmp_path: Path) -> None:
    with Pool(tmp_path / "a.pool", threads=1):
        pass
    assert "holds no training yet" in refusal("evaluate", tmp_path / "a.pool", code=1)
    assert "holds no pool" in refusal("evaluate", tmp_path / "absent.pool", code=1)
    assert not (tmp_path / "absent.pool").exists()


def test_pool_that_held_nothing_out_needs_data(tmp_path: Path) -> None:
    train(tmp_path / "a.pool", "data.source=synthetic:tiny?samples=200", "eval.fraction=0")
    assert "eval.fraction is 0" in refusal("evaluate", tmp_path / "a.pool")


def test_changed_data_of_the_pool_is_refused(tmp_path: Path) -> None:
    data = csv_file(tmp_path / "train.csv", 300, seed=9)
    train(tmp_path / "a.pool", f"data.source=csv:{data}")
    csv_file(tmp_path / "train.csv", 301, seed=9)
    said = refusal("evaluate", tmp_path / "a.pool")
    assert "is not the data that pool" in said
    assert "  num_samples: 300 in the pool, 301 now" in said


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.top=8"], "model.top cannot be set here"),
        (["--set", "data.hash_size=8"], "data.hash_size cannot be set here"),
        (["--set", "run.thread=8"], "nearest is 'run.threads'"),
        (["--data", "nonsense"], "is of no known kind"),
    ],
)
def test_settings_of_the_model_are_the_pools(
    trained: tuple[Path, dict[str, Any]], options: list[str], message: str
) -> None:
    assert message in refusal("evaluate", trained[0], *options)


def test_scores_never_go_into_the_pool_or_over_a_file(
    tmp_path: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    pool, _ = trained
    before = traces(pool)
    assert "inside pool" in refusal("predict", pool, "--out", pool / "scores.parquet")
    (tmp_path / "taken").write_text("keep")
    assert "'{}' exists".format(tmp_path / "taken") in refusal(
        "predict", pool, "--out", tmp_path / "taken"
    )
    assert (tmp_path / "taken").read_text() == "keep"
    assert traces(pool) == before


def test_other_number_of_dense_columns_is_refused(tmp_path: Path) -> None:
    schema = '[label]\ncolumn = "click"\n[[dense]]\ncolumn = "age"\n[[sparse]]\ncolumn = "user"\n'
    data = csv_file(tmp_path / "train.csv", 300, seed=10)
    (tmp_path / "one.toml").write_text(schema)
    pool = tmp_path / "a.pool"
    train(pool, f"data.source=csv:{data}", f"data.schema={tmp_path / 'one.toml'}")
    frame = polars.read_csv(data).with_columns(polars.lit(1).alias("more"))
    frame.write_parquet(tmp_path / "more.parquet")
    two = schema + '[[dense]]\ncolumn = "more"\n'
    (tmp_path / "two.toml").write_text(two)
    options = ("--data", f"parquet:{tmp_path / 'more.parquet'}", "--set")
    said = refusal("evaluate", pool, *options, f"data.schema={tmp_path / 'two.toml'}", code=1)
    assert "the data has 2 dense columns" in said
    same = events("evaluate", pool, *options, f"data.schema={tmp_path / 'one.toml'}")
    assert "trained on csv: data, this is parquet: data" in same["notice"]["text"]
    as_text = events("evaluate", pool, "--data", f"csv:{data}")
    assert metrics(same["result"]) == metrics(as_text["result"])
