"""The honest-calibration rule: no constant and no input can change without a new calibration."""

from dataclasses import replace

import pytest

from trainingcxl.sim import TARGETS, ParameterError, load_hardware
from trainingcxl.sim import calibration as rule


def test_frozen_constants_are_what_the_fit_gives():
    frozen = rule.frozen_calibration()
    assert rule.fit() == pytest.approx(dict(frozen.constants), rel=1e-9)
    assert dict(frozen.fitted_on) == rule.FITTED_ON


def test_frozen_calibration_keeps_the_rule():
    rule.check_rule(rule.frozen_calibration())


def test_exactly_three_constants_and_no_hold_out():
    frozen = rule.frozen_calibration()
    assert len(frozen.constants) == 3
    assert set(frozen.fitted_on.values()) == {"T1", "T3", "T4"}
    assert {t.name for t in TARGETS.values() if not t.is_fitted} == {"T2", "T5", "T6", "T7"}


@pytest.mark.parametrize("target", ["T2", "T5", "T6", "T7", "T1"])
def test_fitting_on_a_hold_out_or_twice_on_one_target_is_refused(target):
    frozen = rule.frozen_calibration()
    changed = {**frozen.fitted_on, "media.pmem.read_after_write": target}
    with pytest.raises(ParameterError, match=f"is fitted on {target}"):
        rule.check_rule(replace(frozen, fitted_on=changed))


def test_more_constants_than_fitted_targets_are_refused():
    frozen = rule.frozen_calibration()
    more = {**frozen.constants, "gpu.efficiency": 0.35}
    with pytest.raises(ParameterError, match="4 constants for 3 fitted targets"):
        rule.check_rule(replace(frozen, constants=more))


def test_a_changed_input_is_refused(monkeypatch):
    tuned = load_hardware(calibrated=False).with_values({"gpu.efficiency": 0.35})
    monkeypatch.setattr(rule, "load_hardware", lambda **_: tuned)
    with pytest.raises(ParameterError, match="an input changed after the freeze"):
        rule.check_rule(rule.frozen_calibration())


def test_fitted_constants_carry_their_target_as_note():
    notes = load_hardware().notes
    for key, target in rule.FITTED_ON.items():
        assert notes[key].tag == "F"
        assert target in notes[key].source


def test_every_number_has_a_tag_and_a_source():
    hardware = load_hardware()
    for key in hardware.values():
        assert hardware.notes[key].source not in ("", "not stated"), key


def test_fit_reads_no_hold_out(monkeypatch):
    """The fit gives the same constants when the hold-outs' paper values are nonsense."""
    before = rule.fit()
    changed = {
        name: target if target.is_fitted else replace(target, paper=1e9)
        for name, target in TARGETS.items()
    }
    monkeypatch.setattr(rule, "TARGETS", changed)
    assert rule.fit() == before
