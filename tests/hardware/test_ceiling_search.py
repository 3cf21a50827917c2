"""Which shape wins, in a burst and held, by times that are made up."""

from __future__ import annotations

import math

import pytest
import torch

from truemfu.hardware.ceiling import search as ceiling_search
from truemfu.hardware.ceiling.ceiling import measure_ceiling
from truemfu.hardware.ceiling.clock_watch import Run, Watch
from truemfu.hardware.ceiling.products import Product, Shape, flops_of
from truemfu.hardware.ceiling.search import Tried, hold, search, shapes_for, whole_waves
from truemfu.hardware.specs import DEVICES

CPU = torch.device("cpu")
SMALL, MIDDLE, LARGE = (2, 2, 2), (4, 4, 4), (8, 8, 8)


class Chip:
    """A device with a rate for each shape, cold and under load; it is hot after `heat_s` without a rest."""

    def __init__(
        self, cold: dict[Shape, float], hot: dict[Shape, float] | None = None, heat_s: float = 0.0
    ) -> None:
        self.cold, self.hot = cold, hot or cold
        self.heat_s = heat_s
        self.busy_s = 0.0
        self.watched: list[Shape] = []

    def product_of(self, device: torch.device, dtype: str, shape: Shape) -> Product:
        if math.isnan(self.cold[shape]):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return lambda: shape

    def timed(self, product: Product, device: torch.device, products: int, watch: Watch) -> Run:
        shape = product()
        assert isinstance(shape, tuple)
        if watch.notes:
            self.watched.append(shape)
        seconds = products * flops_of(shape) / (self.hot if self.busy_s >= self.heat_s else self.cold)[shape]
        self.busy_s += seconds
        return Run(products=products, seconds=seconds)

    def rest(self, seconds: float) -> None:
        self.busy_s = 0.0


def install(monkeypatch: pytest.MonkeyPatch, chip: Chip) -> None:
    monkeypatch.setattr(ceiling_search, "_CPU_SHAPES", tuple(chip.cold))
    monkeypatch.setattr(ceiling_search, "product_of", chip.product_of)
    monkeypatch.setattr(ceiling_search, "timed", chip.timed)
    monkeypatch.setattr(ceiling_search.time, "sleep", chip.rest)


def ignore(text: str) -> None: ...


def test_every_burst_is_measured_on_a_rested_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip({SMALL: 800e3, LARGE: 900e3}, {SMALL: 1e3, LARGE: 1e3}, heat_s=0.025)
    install(monkeypatch, chip)
    tried = search(CPU, "fp32", Watch(), ignore)
    assert not isinstance(tried, str)
    assert [(one.shape, round(one.flops_per_s)) for one in tried] == [(LARGE, 900_000), (SMALL, 800_000)]


def test_the_shape_held_is_the_one_that_is_best_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large product wins the burst; at the power limit the one within the cache does."""
    cold = {SMALL: 850e3, MIDDLE: 500e3, LARGE: 900e3}
    chip = Chip(cold, {SMALL: 665e3, MIDDLE: 690e3, LARGE: 640e3}, heat_s=0.3)
    install(monkeypatch, chip)
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=2.0)
    assert found.burst is not None
    assert found.sustained is not None
    assert found.shape == found.burst.shape == LARGE
    assert found.burst_flops_per_s == pytest.approx(900e3)
    # The middle one would hold still more, but is too far behind in the burst to be tried.
    assert found.sustained.shape == SMALL
    assert found.sustained_flops_per_s == pytest.approx(665e3)
    assert found.sustained.seconds == pytest.approx(1.0, rel=0.15)


def test_only_the_long_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip({SMALL: 850e3, LARGE: 900e3})
    install(monkeypatch, chip)
    bursts = [
        Tried(shape=shape, runs=(Run(products=1, seconds=flops_of(shape) / chip.cold[shape]),), loaded_s=0.0)
        for shape in (LARGE, SMALL)
    ]
    held = hold(CPU, "fp32", bursts, Watch(notes=("this one",)), 0.8, ignore, rested=True)
    assert set(chip.watched) == {held.shape} == {LARGE}
    # Loaded for half of the run's time, two trials of an eighth each, and the run itself.
    assert held.loaded_s == pytest.approx(1.4, rel=0.06)
    again = hold(CPU, "fp32", bursts, Watch(), 0.8, ignore, rested=False)
    assert again.loaded_s == pytest.approx(1.0, rel=0.06)


def test_sustained_is_the_second_half_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip({LARGE: 900e3}, {LARGE: 450e3}, heat_s=0.85)
    install(monkeypatch, chip)
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=2.0)
    assert found.sustained_flops_per_s == pytest.approx(450e3)
    assert found.burst_flops_per_s == pytest.approx(900e3)


def test_a_burst_is_never_below_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour on the machine may have slowed every short run."""
    chip = Chip({LARGE: 300e3}, {LARGE: 900e3}, heat_s=0.5)
    install(monkeypatch, chip)
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=2.0)
    assert found.sustained_flops_per_s == pytest.approx(900e3)
    assert found.burst_flops_per_s == pytest.approx(900e3)


def test_a_shape_too_large_for_memory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Chip({SMALL: 100e3, LARGE: math.nan}))
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=0.1)
    assert found.shape == SMALL
    install(monkeypatch, Chip({LARGE: math.nan}))
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=0.1)
    assert (found.skipped, found.burst, found.sustained) == ("no shape fits in memory", None, None)


def test_a_shape_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2 s for one product is the most: the large one would need 0.25 s at the rate of the small one."""
    install(monkeypatch, Chip({SMALL: 4096.0, MIDDLE: 4096.0, LARGE: 4096.0}))
    tried = search(CPU, "fp64", Watch(), ignore)
    assert not isinstance(tried, str)
    assert {one.shape for one in tried} == {SMALL, MIDDLE}


def test_a_dtype_is_skipped_only_if_no_shape_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip({SMALL: 100e3, LARGE: 100e3})
    install(monkeypatch, chip)

    def product_of(device: torch.device, dtype: str, shape: Shape) -> Product:
        if shape == SMALL:
            raise RuntimeError("no kernel for this shape")
        return chip.product_of(device, dtype, shape)

    monkeypatch.setattr(ceiling_search, "product_of", product_of)
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=0.1)
    assert (found.skipped, found.shape) == (None, LARGE)


def test_an_error_of_torch_is_told_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def product_of(device: torch.device, dtype: str, shape: Shape) -> Product:
        raise RuntimeError("\n_scaled_mm needs compute capability 8.9\nCUDA kernel errors might be\n")

    monkeypatch.setattr(ceiling_search, "product_of", product_of)
    assert search(CPU, "fp8", Watch(), ignore) == "_scaled_mm needs compute capability 8.9"


@pytest.mark.parametrize("sm_count", sorted({spec.sm_count for spec in DEVICES if spec.sm_count}))
def test_fitted_shapes_fill_every_wave_and_fit_in_memory(sm_count: int) -> None:
    for m, n, k in whole_waves(sm_count):
        for tile_m, tile_n in ((256, 128), (128, 128)):
            assert m % tile_m == n % tile_n == 0
            assert (m // tile_m) * (n // tile_n) % sm_count == 0
        assert k % 256 == 0
        assert 4 * (m * k + k * n) + 8 * (m * k + k * n + m * n) < 8e9
        assert max(m, n) < 32768


def test_shapes_are_tried_from_small_to_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 128

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    shapes = shapes_for(torch.device("cuda"))
    assert [flops_of(shape) for shape in shapes] == sorted(flops_of(shape) for shape in shapes)
    assert len(set(shapes)) == len(shapes) <= 8
    assert shapes_for(torch.device("xpu"))[0] == (2048, 2048, 2048)
