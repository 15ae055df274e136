"""HYBRID_REFERENCE: which parts run by their reference implementation, and what is refused."""

import re

import pytest

from evaluation.generate import main as generate
from ops.reference import PARTS, SwitchError, check_environment, reference_chosen, reference_parts
from training.config import ConfigError, parse_config


def test_parts_are_read_in_any_order_and_spacing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HYBRID_REFERENCE", raising=False)
    assert reference_parts() == []
    for text in ("loss,attention", " attention , loss ,", "loss,attention,loss"):
        monkeypatch.setenv("HYBRID_REFERENCE", text)
        assert reference_parts() == ["attention", "loss"]
        assert reference_chosen("loss") == reference_chosen("attention") == "HYBRID_REFERENCE=attention,loss"
        assert reference_chosen("norm") == ""
    monkeypatch.setenv("HYBRID_REFERENCE", ",".join(PARTS))
    assert reference_parts() == list(PARTS)


def test_unknown_parts_are_refused_with_the_allowed_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYBRID_REFERENCE", "loss,atention")
    message = "HYBRID_REFERENCE=loss,atention: there is no 'atention'; name some of " + ",".join(PARTS)
    for refuses in (reference_parts, lambda: reference_chosen("loss"), check_environment):
        with pytest.raises(SwitchError, match=re.escape(message)):
            refuses()
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(["--name=x"], "test")


@pytest.mark.parametrize(
    ("name", "part"),
    [*((f"HYBRID_FUSED_{part.upper()}", part) for part in PARTS[:-1]), ("HYBRID_CUDA_GRAPHS", "graphs")],
)
def test_replaced_variables_are_refused_with_the_new_one(monkeypatch: pytest.MonkeyPatch, name: str, part: str):
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=f"^{name} is not read any more; .* HYBRID_REFERENCE={part} "):
        parse_config(["--name=x"], "test")


def test_evaluation_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HYBRID_FUSED_LOSS", "0")
    assert generate(["/nowhere", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: HYBRID_FUSED_LOSS is not read any more")
    assert error.count("\n") == 1
