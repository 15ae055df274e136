"""What tests/environments/ checks with other versions of the libraries, here with those of the lock."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
from helpers.tiny_exports import ROOT, library, make_exported, write_expected

pytestmark = pytest.mark.slow
# Read, as importing them would import transformers before any test runs.
CHECKS = {
    name: drive
    for drive in ("drive", "drive_adapters", "drive_embeddings")
    for name in re.findall(r"^def check_(\w+)", (ROOT / f"tests/environments/{drive}.py").read_text(), re.MULTILINE)
}
# test_export.py has the first; the lock has no package for the others.
ELSEWHERE = re.compile("outputs_are_ours|quantised|mteb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    library()
    model, folder = make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert", sentences=True)
    write_expected(model, folder)
    return folder


@pytest.mark.parametrize("name", [name for name in CHECKS if not ELSEWHERE.search(name)])
def test_libraries_drive_an_exported_folder(folder, name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "environments")
    module = importlib.import_module(CHECKS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside other libraries are not ours to fix
        try:
            module.CHECKS[name](folder)
        except importlib.import_module("drive").Absent as reason:
            pytest.skip(f"{reason} (requirements.lock has it)")


@pytest.mark.gpu
def test_offloaded_caches_generate_the_same(folder, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "environments")
    importlib.import_module("drive").check_every_cache_generates_the_same(folder)


def test_the_hub_knows_a_model_of_sentence_transformers(folder):
    card = pytest.importorskip("huggingface_hub").ModelCard.load(folder / "README.md")
    assert card.data.tags[0] == "sentence-transformers"
    assert 'SentenceTransformer("exported-gpt-bert"' in card.text
