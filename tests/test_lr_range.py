"""benchmarks/lr_range.py: what it marks on a curve, and a test from its flags to its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.tiny_runs import flags, make_inputs

from benchmarks.lr_range import main, marks


def test_marks_of_a_curve():
    """Of a loss that falls between 1e-4 and 1e-2, fastest at 1e-3, and rises again from 1e-1 on."""
    rates = [10 ** (-5 + 5 * step / 499) for step in range(500)]
    losses = [5 - math.tanh(math.log10(rate) + 3) + 10 * max(0.0, math.log10(rate) + 1) ** 2 for rate in rates]
    found = marks(rates, losses)
    assert found["steepest"] == pytest.approx(1e-3, rel=0.3)
    assert 1e-2 < (found["lowest"] or 0) < 0.2
    assert found["lowest"] < (found["rises"] or 0) < 0.5
    assert marks(rates[:100], [5 - step / 100 for step in range(100)]) | {"steepest": 0} == (
        {"steepest": 0, "lowest": rates[99], "rises": None}
    )


def test_range_test_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever course the flags give the rate: it rises from --low to --high, and its end may be a loss of nan."""
    inputs, output = make_inputs(tmp_path / "inputs", documents=60), tmp_path / "range"
    given = flags(inputs, tmp_path, schedule="wsd", decay_proportion=0.1, optimizer="adamw", max_gradient=0)
    assert main(["--output", str(output), "--low", "1e-4", "--high", "100", "--steps", "40", *given]) == 0
    results = json.loads((output / "lr_range.json").read_text())
    rates = results["rates"]
    assert rates == pytest.approx([1e-4 * 10 ** (6 * step / 40) for step in range(len(rates))])
    assert len(results["losses"]) == len(rates) > 20
    assert results["found"]["steepest"] <= results["found"]["lowest"] < results["found"]["rises"] < 100
    assert f"lowest    {results['found']['lowest']:.3g}" in capsys.readouterr().out
    assert (output / "lr_range.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="2"):
        main(["--output", str(output), "--low", "1", "--high", "0.5"])
    assert "give rates above 0, the lower one first" in capsys.readouterr().err
