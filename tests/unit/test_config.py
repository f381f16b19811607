"""Settings: precedence, types, unknown names, and what a change does to a run."""

from dataclasses import fields
from pathlib import Path

import pytest

from trainingcxl.config import (
    Effect,
    Settings,
    differences,
    load_settings,
    show_settings,
)
from trainingcxl.errors import ConfigError
from trainingcxl.setting_values import hash_sizes, widths


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nepochs = 2\nbatch_size = 64\nseed = 7\n[dense]\nlr = 1\n")
    settings = load_settings(
        config_file=file,
        assignments=["run.batch_size=128", "run.seed=8"],
        flags={"run.seed": 9, "run.epochs": None},
    )
    assert settings.run.epochs == 2
    assert settings.run.batch_size == 128
    assert settings.run.seed == 9
    assert settings.dense.lr == 1.0
    assert settings.run.threads == Settings().run.threads


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("run.batch_size=4_096", "run.batch_size", 4096),
        ("rows.lr=1e-1", "rows.lr", 0.1),
        ("data.shuffle=True", "data.shuffle", True),
        ("model.top=64", "model.top", "64"),
        ("model.bottom=", "model.bottom", ""),
        ("data.source=criteo:a=b.gz", "data.source", "criteo:a=b.gz"),
        ("run.dense_every=50", "run.dense_every", "50"),
    ],
)
def test_assignments_are_read_by_type(text: str, name: str, value: object) -> None:
    assert load_settings(assignments=[text]).flat()[name] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.treads=2", "no setting 'run.treads'; the nearest is 'run.threads'"),
        ("batch_size=2", "the nearest is 'run.batch_size'"),
        ("eval.patiense=2", "the nearest is 'eval.patience'"),
        ("foo.bar=1", "no setting 'foo.bar'\n"),
        ("run.seed=x", "run.seed is 'x', expected a value of type whole number"),
        ("run.seed=1.5", "whole number"),
        ("run.seed=-1", "run.seed is -1, expected a number of at least 0"),
        ("data.shuffle=2", "true or false"),
        ("dense.lr=nan", "dense.lr is nan"),
        ("dense.lr=-0.1", "dense.lr is -0.1"),
        ("run.batch_size=0", "at least 1"),
        ("run.dense_every=0", "auto or a number of at least 1"),
        ("run.dense_every=often", "auto or a number"),
        ("model.top=512-x", "widths joined by '-'"),
        ("eval.fraction=1", r"a number in \[0, 1\)"),
        ("rows.optimizer=adam", "one of rowwise-adagrad, adagrad, sgd"),
        ("run.epochs", "has no '='"),
        ("data.hash_size=many", "a number of rows, or NAME=ROWS"),
        ("data.hash_size=-1", "a number of rows, or NAME=ROWS"),
        ("data.hash_size=C1=0", "a number of rows, or NAME=ROWS"),
    ],
)
def test_wrong_assignments_say_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(assignments=[text])


def test_hash_sizes_for_all_features_or_one_by_one(tmp_path: Path) -> None:
    def sizes(*assignments: str, file: str = "") -> int | dict[str, int]:
        config = tmp_path / "run.toml"
        config.write_text(file)
        settings = load_settings(config_file=config, assignments=assignments)
        return hash_sizes(settings.data.hash_size)

    assert sizes() == 0
    assert sizes("data.hash_size=1000") == 1000
    assert sizes(file="[data]\nhash_size = 1000\n") == 1000
    assert sizes("data.hash_size=C1=10,C2=20") == {"C1": 10, "C2": 20}
    assert sizes(file="[data]\nhash_size = 'C1=10'\n") == {"C1": 10}


def test_patience_needs_held_out_data() -> None:
    with pytest.raises(ConfigError, match=r"0 while eval\.fraction is 0"):
        load_settings(assignments=["eval.fraction=0", "eval.patience=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nepoch = 1\n", "nearest is 'run.epochs'"),
        ("[runs]\nepochs = 1\n", "nearest is 'run.epochs'"),
        ("epochs = 1\n", "nearest is 'run.epochs'"),
        ("[run]\nepochs = '1'\n", "run.epochs is '1', expected a value of type whole number"),
        ("[run]\nepochs = true\n", "run.epochs is True"),
        ("[run\n", "is not TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(config_file=file)


def test_shown_settings_can_be_read_back(tmp_path: Path) -> None:
    settings = load_settings(
        assignments=["run.epochs=3", "dense.lr=0.5", 'data.source=csv:a\\"b', "data.shuffle=true"]
    )
    file = tmp_path / "run.toml"
    file.write_text(show_settings(settings))
    assert load_settings(config_file=file) == settings


def test_every_setting_is_shown_with_default_and_meaning() -> None:
    lines = show_settings(load_settings(assignments=["run.epochs=3"])).splitlines()
    shown = [line for line in lines if "=" in line.partition("#")[0]]
    assert len(shown) == len(Settings().flat())
    assert all("# default " in line for line in shown)
    (epochs,) = (line for line in shown if line.startswith("epochs"))
    assert epochs.startswith("epochs = 3 ")
    assert "default 1; passes over" in epochs


def test_sections_stay_small() -> None:
    for section in fields(Settings):
        assert len(fields(section.default_factory)) <= 14


def test_differences_tell_what_changes_the_result() -> None:
    recorded = Settings().flat()
    current = load_settings(
        assignments=["run.batch_size=1", "run.epochs=2", "run.threads=9", "pool.path=moved.pool"]
    )
    effects = {found.name: found.effect for found in differences(recorded, current)}
    assert effects == {
        "run.batch_size": Effect.RESULT,
        "run.epochs": Effect.NONE,
        "run.threads": Effect.ROUNDING,
    }


def test_differences_take_defaults_for_settings_of_other_versions() -> None:
    recorded = Settings().flat() | {"run.gone": 5}
    del recorded["run.seed"]
    assert differences(recorded, Settings()) == []
    (found,) = differences(recorded, load_settings(assignments=["run.seed=1"]))
    assert (found.recorded, found.current) == (0, 1)


@pytest.mark.parametrize(("patience", "effect"), [(0, Effect.NONE), (1, Effect.RESULT)])
def test_evaluations_matter_only_to_early_stopping(patience: int, effect: Effect) -> None:
    old = load_settings(assignments=[f"eval.patience={patience}"])
    new = load_settings(assignments=[f"eval.patience={patience}", "eval.every=10"])
    assert [found.effect for found in differences(old.flat(), new)] == [effect]


def test_widths() -> None:
    assert widths("model.top", "512-256") == [512, 256]
    assert widths("model.top", "") == []
    for text in ["0", "5-", "-5", "5,4", "five"]:
        with pytest.raises(ConfigError, match="model\\.top"):
            widths("model.top", text)
