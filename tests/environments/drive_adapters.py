"""Drives exported folders through PEFT, as drive.py does through transformers.

python drive_adapters.py FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from drive import GREEDY, HEADS, batch_for, close, inputs_alone, labels_for, load, main, need, rows

MATRICES = ["in_proj_qk", "in_proj_vg", "in_proj_v", "out_proj", "mlp.1", "mlp.4"]


def check_adapters_for_every_head(folder: Path) -> None:
    peft = need("peft")
    inputs, _ = rows("right", folder)
    for auto, task in HEADS.items():
        given = batch_for(auto, inputs)
        torch.manual_seed(0)
        targets = "all-linear" if task in ("SEQ_CLS", "CAUSAL_LM", None) else MATRICES
        config = peft.LoraConfig(task_type=task, target_modules=targets)
        before = load(auto, folder).eval()
        model = peft.get_peft_model(before, config)
        loss = model(**given, **labels_for(auto, inputs)).loss
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None, (auto, name)
                    parameter += 0.1
            expected = model.eval()(**given)[0]
            with tempfile.TemporaryDirectory() as out:
                model.save_pretrained(out)
                torch.manual_seed(7)  # another new head, which the adapter's own replaces
                again = peft.PeftModel.from_pretrained(load(auto, folder), out).eval()
                close(again(**given)[0], expected)
            close(model.merge_and_unload()(**given)[0], expected, 1e-4)


def check_other_adapters(folder: Path) -> None:
    peft = need("peft")
    inputs, _ = rows("right", folder)
    virtual = {"num_virtual_tokens": 3}
    scaled = {"target_modules": ["in_proj_vg", "in_proj_v", "mlp.4"], "feedforward_modules": ["mlp.4"]}
    configurations = {
        "AutoModelForSequenceClassification": [
            peft.PromptTuningConfig(task_type="SEQ_CLS", **virtual), peft.IA3Config(task_type="SEQ_CLS", **scaled)
        ],
        "AutoModelForCausalLM": [
            peft.PromptTuningConfig(task_type="CAUSAL_LM", **virtual),
            peft.PrefixTuningConfig(task_type="CAUSAL_LM", **virtual),
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=MATRICES, use_dora=True),
        ],
    }  # fmt: skip
    for auto, tried in configurations.items():
        for config in tried:
            model = peft.get_peft_model(load(auto, folder), config)
            model(**inputs, **labels_for(auto, inputs)).loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
            if "Causal" in auto:
                assert model.eval().generate(**inputs_alone(folder), **GREEDY).shape[1] > 12


CHECKS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


if __name__ == "__main__":
    sys.exit(main(CHECKS, Path(sys.argv[1])))
