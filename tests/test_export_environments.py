"""What tests/environments/ checks with other versions of the libraries, here with those of the lock."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from helpers.tiny_exports import ROOT, library, make_exported, write_expected

pytestmark = pytest.mark.slow
# Read, as importing them would import transformers before any test runs. What is left out test_export.py has.
CHECKS = re.findall(r"^def check_(\w+)", (ROOT / "tests/environments/drive.py").read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    library()
    model, folder = make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert")
    write_expected(model, folder)
    return folder


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "outputs_are_ours" and "quantised" not in name])
def test_libraries_drive_an_exported_folder(folder, name):
    from environments import drive

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside other libraries are not ours to fix
        try:
            drive.CHECKS[name](folder)
        except drive.Absent as reason:
            pytest.skip(f"{reason} (requirements.lock has it)")
