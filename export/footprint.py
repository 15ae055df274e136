"""Footprint of a run: device-hours of its steps, and energy and emissions with the assumptions that they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Watts that a device draws at most, by the data sheets of NVIDIA and AMD; the first name that a device's holds counts.
_WATTS = {
    "H200 NVL": 600, "H200": 700, "H100 NVL": 400, "H100 PCIe": 350, "H100": 700, "B200": 1000, "A100-PCIE": 250,
    "A100 80GB PCIe": 300, "A100": 400, "V100-PCIE": 250, "V100": 300, "L40S": 350, "RTX 4090": 450, "RTX 3090": 350,
    "MI300X": 750, "MI250X": 560,
}  # fmt: skip
_OVERHEAD = 1.56  # a data centre's energy for each unit of its machines': Uptime Institute, Global Survey 2024
_GRAMS = 480.0  # of CO2-equivalent a kWh, world average of 2023: Ember, Global Electricity Review 2024


@dataclass(frozen=True)
class Footprint:
    """hours: of steps, on the clock. device_hours: the sum over devices. hardware: such as "8 x NVIDIA H200". watts: a
    device's, 0 where unknown. grams: emitted a kWh. The flags of to_huggingface.py say these two."""

    hours: float
    device_hours: float
    hardware: str
    watts: float
    grams: float

    @property
    def energy(self) -> float:
        """In kWh, of the devices and of what surrounds them."""
        return self.device_hours * self.watts / 1000 * _OVERHEAD

    @property
    def emitted(self) -> float:
        """Grams of CO2-equivalent."""
        return self.energy * self.grams

    def section(self) -> str:
        """What the model card says."""
        text = (
            f"## Footprint\n\nThe steps took {_number(self.hours)} hours on {self.hardware}, "
            f"{_number(self.device_hours)} device-hours. Start-up, validation, saving, steps that were lost and other "
            "runs on the way to this one are not in it."
        )
        if not self.watts:
            return f"{text} The power of these devices is not known, so energy and emissions are not estimated."
        world = (
            " (the world's mean of 2023 by Ember; that of the place may differ tenfold)" if self.grams == _GRAMS else ""
        )
        return (
            f"{text} By device-hours x power x overhead x intensity (Lacoste et al., 2019, arXiv:1910.09700) about "
            f"**{_number(self.energy)} kWh and {_number(self.emitted / 1000)} kg of CO2-equivalent**. This assumes "
            f"{self.watts:g} W a device all the time (its limit, unless the makers gave another), {_OVERHEAD:g} times "
            "that for the data centre (the mean of Uptime Institute's survey of 2024), nothing for hosts and network, "
            f"and {self.grams:g} g a kWh{world}."
        )

    def metadata(self) -> dict[str, Any]:
        """`co2_eq_emissions` of the Hub's metadata, in grams; {} where emissions are not known."""
        if not self.watts:
            return {}
        source = f"{self.device_hours:.3g} device-hours x {self.watts:g} W x {_OVERHEAD:g} x {self.grams:g} g/kWh"
        about = {"source": source, "training_type": "pre-training", "hardware_used": self.hardware}
        return {"co2_eq_emissions": {"emissions": float(f"{self.emitted:.3g}"), **about}}


def footprint(
    metrics: Iterable[Mapping[str, Any]], launches: Iterable[Mapping[str, Any]], watts: float = 0.0, grams: float = 0.0
) -> Footprint | None:
    """Of the steps that metrics tell of, on the devices of the launches; None where they do not tell. watts: of a
    device (0: by its name). grams: a kWh (0: the world's mean)."""
    starts = sorted((each.get("start_step", 0), each["world_size"], str(each["device"])) for each in launches)
    hours = device_hours = before = 0.0
    for line in metrics:
        tokens, rate = line.get("stats/tokens"), line.get("stats/tokens_per_second")
        if not tokens or not rate:
            continue
        size = next((size for step, size, _ in reversed(starts) if step < line["step"]), 1)
        took = max(0.0, tokens - before) / rate / 3600
        hours, device_hours, before = hours + took, device_hours + took * size, tokens
    if not hours or not starts:
        return None
    hardware = " and ".join(dict.fromkeys(f"{size} x {device}" for _, size, device in starts))
    known = {next((watts for name, watts in _WATTS.items() if f" {name}" in device), 0) for _, _, device in starts}
    return Footprint(hours, device_hours, hardware, watts or (known.pop() if len(known) == 1 else 0), grams or _GRAMS)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
