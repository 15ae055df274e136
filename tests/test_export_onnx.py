"""export/to_onnx.py: batches and lengths of any size in onnxruntime, against ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_exports import BOS, PAD, library, load, make_exported

from export import to_onnx


def run(folder: Path, ids: torch.Tensor, output: str) -> torch.Tensor:
    """The output of folder/model.onnx for rows that end in padding."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {"input_ids": ids.numpy(), "attention_mask": (ids != PAD).numpy().astype(np.int64)}
    return torch.from_numpy(session.run([output], inputs)[0])


def rows(count: int, length: int) -> torch.Tensor:
    ids = torch.randint(16, 300, (count, length), generator=torch.Generator().manual_seed(length))
    ids[:, 0], ids[-1, length // 2 + 1 :] = BOS, PAD
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "form"), [("masked", "gpt-bert"), ("encoder", "ltg-bert-rope"), ("classifier", "ltg-bert")]
)
@torch.no_grad()
def test_onnxruntime_gives_what_ours_gives(tmp_path, capsys, task, form):
    library()
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"needs {package} (requirements.lock has it)")
    model, folder = make_exported(tmp_path, form)
    out = tmp_path / "onnx"
    if task == "classifier":
        assert to_onnx.main([str(folder), str(out), "--task", task]) == 2
        assert "has no such head; fine-tune one" in capsys.readouterr().err
        torch.manual_seed(0)
        classifier = load("AutoModelForSequenceClassification", folder, num_labels=3).eval()
        folder = tmp_path / "tuned"
        classifier.save_pretrained(folder)
    assert to_onnx.main([str(folder), str(out), "--task", task]) == 0
    assert "onnxruntime differs" in capsys.readouterr().out
    for ids in (rows(1, 2), rows(4, 33), rows(2, 60)):
        document_ids = torch.where(ids == PAD, -1, 0)
        hidden, real = model.encode(ids, document_ids, False), ids != PAD
        if task == "encoder":
            found, expected = run(out, ids, "last_hidden_state")[real], hidden[real]
        elif task == "masked":
            found, expected = run(out, ids, "logits")[:, 1:][real[:, 1:]], model.predict(hidden)[:, :-1][real[:, 1:]]
        else:
            found, expected = run(out, ids, "logits"), classifier.score(hidden[:, 0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_no_exported_folder_is_refused(tmp_path, capsys):
    for package in ("transformers", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"needs {package} (requirements.lock has it)")
    (tmp_path / "run").mkdir()
    assert to_onnx.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "write one with export/to_huggingface.py first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
