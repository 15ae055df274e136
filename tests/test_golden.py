"""The models, LAMB and the learning rate against numbers of the published code (tests/golden)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import LTGBert, ModelConfig
from model_extra import GPTBert, build_model
from training.optimizers import clip_gradients, make_optimizer
from training.schedules import learning_rate

GOLDEN = Path(__file__).parent / "golden"
MODELS = {"model": LTGBert, "model_extra": GPTBert}


class Golden:
    """Arrays of one model as tensors, and the model with its parameters."""

    def __init__(self, name: str) -> None:
        self.arrays = {}
        for file in (f"{name}.npz", f"{name}_gradients.npz"):
            with np.load(GOLDEN / file) as archive:
                self.arrays.update({key: torch.from_numpy(archive[key]) for key in archive.files})
        self.model = MODELS[name](ModelConfig.from_json(GOLDEN / f"{name}.json"))
        self.model.load_state_dict(self.starting("param/"), strict=True)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.arrays[key]

    def starting(self, prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.arrays.items() if key.startswith(prefix)}

    def losses(self, objective: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Cross-entropy, z-loss, accuracy and number of targets."""
        labels = self[f"{objective}/labels"].flatten()
        positions = (labels != -100).nonzero().flatten()
        logits = self.model(self["input_ids"], self["document_ids"], objective == "causal", positions)
        targets = labels[positions]
        accuracy = (logits.argmax(-1) == targets).float().mean()
        return F.cross_entropy(logits, targets), logits.logsumexp(-1).square().mean(), accuracy, len(targets)


@pytest.fixture(params=list(MODELS))
def golden(request) -> Golden:
    return Golden(request.param)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_hidden(golden: Golden, objective: str):
    hidden = golden.model.encode(golden["input_ids"], golden["document_ids"], objective == "causal")
    expected = golden[f"{objective}/hidden"]
    # Relative to each token's own size, padding included: what the published model gives there is reproduced too.
    error = (hidden - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-5


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_losses_and_every_gradient(golden: Golden, objective: str):
    loss, z_loss, accuracy, count = golden.losses(objective)
    assert loss.item() == pytest.approx(golden[f"{objective}/loss"].item(), rel=1e-5)
    assert z_loss.item() == pytest.approx(golden[f"{objective}/z_loss"].item(), rel=1e-5)
    assert accuracy.item() == pytest.approx(golden[f"{objective}/accuracy"].item(), abs=1e-6)
    assert count == golden[f"{objective}/num_tokens"].item()
    (loss + 1e-4 * z_loss).backward()
    expected = golden.starting(f"{objective}/grad/")
    gradients = {name: parameter.grad for name, parameter in golden.model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert relative_error(gradient, expected[name]) < 1e-4, name


def test_lamb_trajectory(golden: Golden):
    model = golden.model
    optimizer = make_optimizer(model, "lamb", lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        loss, z_loss, _, _ = golden.losses("masked")
        (loss + 1e-4 * z_loss).backward()
        norms.append(clip_gradients(model.parameters(), 2.0).item())
        optimizer.step()
    assert norms == pytest.approx(golden["lamb/grad_norms"].tolist(), rel=1e-5)
    expected = golden.starting("lamb/param/")
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.detach(), expected[name]) < 1e-4, name
        # An element whose gradient is all rounding may go its own way, by far less than a step's length.
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_learning_rate_to_the_last_digit():
    with np.load(GOLDEN / "schedule.npz") as archive:
        expected = archive["lr"].tolist()
    assert [learning_rate(step, 1000, 1.0, 0.016, 0.016) for step in range(1000)] == expected


@pytest.mark.parametrize("name", list(MODELS))
def test_published_checkpoint_files_load(name: str):
    """Files of the published code also hold position indices and the tied table under its second name."""
    golden = Golden(name)
    published = golden.starting("param/")
    published["classifier.nonlinearity.5.weight"] = published["embedding.word_embedding.weight"]
    for index in range(3):
        published[f"transformer.attention_layers.{index}.position_indices"] = torch.zeros(64, 64, dtype=torch.int64)
    keys = set(published)
    model = build_model(golden.model.config)
    model.load_state_dict(published, strict=True)
    assert set(published) == keys, "the caller's dictionary is left alone"
    for parameter, other in zip(model.parameters(), golden.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
    published["classifier.nonlinearity.5.weight"] = torch.zeros_like(published["classifier.nonlinearity.5.weight"])
    with pytest.raises(ValueError, match="ties them"):
        model.load_state_dict(published)
