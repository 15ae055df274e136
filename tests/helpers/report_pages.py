"""Run folders as training leaves them, without training, and what a report page of them shows."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from report import html_report

MODES = ("masked", "causal", "fused")
NASTY = "</script><b>&'\""


def write_run(folder: Path, steps: int = 40, shift: float = 0.0, **options: Any) -> Path:
    """A run folder in the form of the training loop, validated and evaluated every 10 steps, restarted at step 20."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3 + shift + 6 / (1 + step / 10) + (step % 3) / 10
        lines.append({
            "step": step, "stats/tokens": 4096 * step, "train/loss": loss, "train/masked_loss": loss,
            "train/causal_loss": loss + 1, "train/masked_accuracy": 0.1, "train/causal_accuracy": 0.2,
            "train/z_loss": 20.0, "stats/learning_rate": 1e-4 * step, "stats/seq_length": 64 * (1 + step // 20),
            "stats/global_batch_size": 64, "stats/mask_p": 0.3 - step / 400, "stats/grad_norm": 1.5,
            "stats/tokens_per_second": 8192.0, "stats/peak_memory_gib": 1.25, "data/fingerprint": "5f",
        })  # fmt: skip
        if step % 10 == 0:
            valid = {f"valid/{p}{o}_loss": 4.0 + shift for p in ("", "ema_") for o in ("masked", "causal")}
            lines.append({"step": step, "stats/tokens": 4096 * step, **valid})
            pairs = {
                f"eval/{m}/blimp{part}": 0.5 + step / 100 for m in MODES for part in ("", "/agreement", "/binding")
            }
            lines.append({"step": step, "stats/tokens": 4096 * step, **pairs})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    launch = {
        "time": "2026-01-01T10:00:00+00:00", "host": "node1", "world_size": 8, "device": "NVIDIA H200",
        "job_id": "77", "restart_count": 0, "start_step": 0, "command": ["train_multi_gpu.py", "--name", NASTY],
    }  # fmt: skip
    config = {
        "flags": {"name": folder.name, "hybrid_numerator": 15, "hybrid_denominator": 16, "optimizer": "lamb",
                  "learning_rate": 0.01 + shift, "max_steps": 100, "train_path": NASTY, "mixed_precision": True},
        "model": {"model_type": "gpt-bert", "hidden_size": 384, "num_hidden_layers": 12},
        "data": {"identity": "ab" * 32, "tokens": 100_000, "documents": 10, "sources": []},
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
        "git_commit": "0123456789abcdef+",
        "launches": [launch, {**launch, "time": "2026-01-01T11:00:00+00:00", "restart_count": 1, "start_step": 20}],
        **options,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "status.json").write_text(json.dumps({"state": "running", "reason": "", "max_steps": 100}))
    (folder / "failures").mkdir()
    failure = {"rank": 3, "host": "node1", "time": 1.0, "error": "the GPU is gone", "secondary": False}
    (folder / "failures" / "77_0_3.json").write_text(json.dumps(failure))
    samples = [
        {"step": 40, "weights": "ema", "kind": "causal", "prompt": "The cat", "text": " sat & ran", "truth": " slept"},
        {"step": 40, "weights": "ema", "kind": "masked", "text": "The <mask> sat.",
         "gaps": [{"truth": " cat", "candidates": [[" dog", 0.5], [" cat", 0.25]]}]},
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def accuracy(value: float) -> dict[str, Any]:
    return {"accuracy": value, "low": value - 0.125, "high": value + 0.125, "pairs": 1000}


def babylm_results(model: object, value: float) -> dict[str, Any]:
    """In the form of evaluation/babylm.py; tests/test_babylm.py holds the reader to what that writes."""
    blimp = {"mean": accuracy(value), "groups": {}, "paradigms": {"binding": accuracy(0.25), "islands": accuracy(0.75)}}
    rho = {"spearman": -0.5, "low": -0.75, "high": 1e-5}
    datasets = {
        "blimp_filtered": {"items": 2000, "modes": {"causal": blimp, "masked": blimp}},
        "wug_past": {"items": 50, "modes": {"causal": rho}},
    }
    return {"model": str(model), "weights": "ema", "shots": 0, "datasets": datasets}


def page_of(tmp_path: Path, *runs: Path) -> str:
    """The page that the command writes."""
    output = tmp_path / "out.html"
    assert html_report.main([*map(str, runs), "-o", str(output)]) == 0
    return output.read_text()


def text_of(page: str) -> str:
    """What a page shows, without its script, style and tags."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def data_of(page: str) -> dict[str, Any]:
    """The numbers that a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))
