"""Bad input of every kind: one error that names file, key, value and the allowed range."""

import json

import pytest

from trainingcxl.sim import (
    SYSTEMS,
    ParameterError,
    find_model,
    find_system,
    load_hardware,
    load_models,
    simulate,
)


def refused(action, *words):
    with pytest.raises(ParameterError) as error:
        action()
    message = str(error.value)
    for word in (*words, "where:", "do:"):
        assert word in message, message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[link]\nbandwith_gbps = 25", ("link.bandwith_gbps", "did you mean 'bandwidth_gbps'")),
        ("[link]\nbandwidth_mbps = 25000", ("link.bandwidth_mbps", "25000", "bandwidth_gbps")),
        ('[link]\nbandwidth_gbps = "25 GB/s"', ("link.bandwidth_gbps", "'25 GB/s'", "GB/s")),
        ("[link]\nbandwidth_gbps = 0", ("link.bandwidth_gbps", "is 0", "(0, 100000] GB/s")),
        ("[link]\nbandwidth_gbps = -5", ("link.bandwidth_gbps", "is -5", "(0, 100000] GB/s")),
        ("[link]\nbandwidth_gbps = nan", ("link.bandwidth_gbps", "nan", "GB/s")),
        ("[link]\nbandwidth_gbps = inf", ("link.bandwidth_gbps", "inf", "GB/s")),
        ("[link]\nbandwidth_gbps = true", ("link.bandwidth_gbps", "True", "GB/s")),
        ("[link]\nbandwidth_gbps = [1, 2]", ("link.bandwidth_gbps", "[1, 2]", "GB/s")),
        ("[link]\nbandwidth_gbps = { value = 5, unit = 'x' }", ("link.bandwidth_gbps.unit",)),
        ("[link]\nbandwidth_gbps = { value = 5, tag = 'Q' }", ("link.bandwidth_gbps.tag", "'Q'")),
        ("[link]\nkind = 'cxl9'", ("link.kind", "cxl9", "cxl3")),
        ("[expander]\nmedium = 'flash'", ("expander.medium", "flash", "pmem")),
        ("[expander]\nchannels = 2.5", ("expander.channels", "2.5", "whole number")),
        ("[expander]\nchannels = 0", ("expander.channels", "is 0", "[1, 1024]")),
        ("[media.pmem]\nread_after_write = 0.5", ("media.pmem.read_after_write", "[1, 100]")),
        ("[media.pmem]\nread_latency_us = 1", ("media.pmem.read_latency_us", "read_latency_ns")),
        ("[media.mram]\nread_latency_ns = 1", ("media.mram.write_latency_ns", "missing")),
        ("[links.mine]\nbandwidth_gbps = 3", ("links",)),
        ("link = 3", ("'link'",)),
        ("not toml", ("not valid TOML",)),
    ],
)
def test_bad_hardware_file(text, words, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(lambda: load_hardware(path), *words, "mine.toml")


def test_missing_and_unreadable_hardware_file(tmp_path):
    refused(lambda: load_hardware(tmp_path / "none.toml"), "no such file", "none.toml")
    refused(lambda: load_hardware(tmp_path), "cannot be read")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    refused(lambda: load_hardware(tmp_path / "binary.toml"), "not valid TOML", "binary.toml")


@pytest.mark.parametrize("item", ["link.bandwidth_gbps", "=3", "link.bandwidth_gbps=", ""])
def test_bad_assignment(item):
    refused(lambda: load_hardware(assignments=[item]), "is not an assignment", "key=value")


def test_a_new_medium_may_be_defined_in_full(tmp_path):
    lines = ["[media.mram]"]
    known = load_hardware().media["pmem"]
    lines += [f"{name} = {getattr(known, name)}" for name in known.__slots__]
    path = tmp_path / "mram.toml"
    path.write_text("\n".join([*lines, "[expander]", "medium = 'mram'"]))
    assert load_hardware(path).pool == known


MODEL = """name = "m"
batch = 64
interaction = "dot"
bottom = [13, 16]
top = [8, 1]
table = [{ count = 2, rows = 100, lookups = 3, dim = 16 }]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch = 64", "batch = 0", ("m.batch", "is 0", "[1, 16777216]")),
        ("batch = 64", "batchsize = 64", ("m.batchsize", "did you mean 'batch'")),
        ("dim = 16", "dim = -1", ("m.table.dim", "is -1")),
        ("dim = 16", "dims = 16", ("m.table.dims", "did you mean 'dim'")),
        ("rows = 100, ", "", ("m.table.rows", "missing")),
        ("dim = 16", "dim = 32", ("m.interaction", "one width")),
        ("[13, 16]", "[16]", ("m.bottom", "at least 2")),
        ("[8, 1]", "[8, 'x']", ("m.top", "whole numbers")),
        ('"dot"', '"sum"', ("m.interaction", "one of dot, cat")),
        ("table = [{", "table = 3 #", ("m.table", "is 3")),
        ("top = [8, 1]\n", "", ("m.top", "missing")),
        ("top", "locality = { reuse = 2 }\ntop", ("m.locality.reuse", "is 2", "[0, 1]")),
        ("top", "locality = { unique_share = 0 }\ntop", ("m.locality.unique_share", "(0, 1]")),
    ],
)
def test_bad_model_file(old, new, words, tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(MODEL.replace(old, new))
    refused(lambda: load_models(path), *words, "model.toml")


def test_good_model_file(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(MODEL)
    model = find_model(str(path))
    assert model.lookups == 64 * 2 * 3
    assert model.pooled_bytes == 64 * 2 * 16 * 4
    assert model.interaction_width == 3 + 16


def test_unknown_names():
    refused(lambda: find_model("RM9"), "'RM9'", "RM1")
    refused(lambda: find_system("CXL-X"), "'CXL-X'", "CXL-B")


def test_model_that_does_not_fit_the_medium():
    hardware = load_hardware(assignments=["media.pmem.modules=1", "media.pmem.module_gb=4"])
    message = refused(
        lambda: simulate(SYSTEMS["CXL"], hardware, find_model("RM2")),
        "RM2",
        "10.2 GB",
        "media.pmem",
        "4.0 GB",
    )
    assert "raise media.pmem.modules" in message


@pytest.mark.parametrize("batches", [0, -3])
def test_no_batches(batches, hardware):
    refused(lambda: simulate(SYSTEMS["CXL"], hardware, find_model("RM1"), batches=batches), "batch")


def test_unknown_engine(hardware):
    model = find_model("RM1")
    refused(lambda: simulate(SYSTEMS["CXL"], hardware, model, engine="fast"), "'fast'", "closed")


def test_results_are_plain_json(hardware):
    result = simulate(SYSTEMS["SSD"], hardware, find_model("rm3"))
    tree = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert tree["kind"] == "model"
