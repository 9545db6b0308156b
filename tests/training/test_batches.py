"""Batches: an order that the seed decides, tiles that are drawn anew, layouts that are kept, errors that arrive."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from psamil.cohort import BagCache, Cohort, simulate
from psamil.errors import DataError
from psamil.training import batches
from psamil.training.batches import BatchLoader, epoch_order

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches") / "cohort"
    simulate(folder, slides=6, tiles=60, dim=8)
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


class Changed:
    """A loader whose bags are changed after they are loaded."""

    def __init__(self, loader, change):
        self.loader, self.change = loader, change

    def load(self, ref):
        return self.change(self.loader.load(ref))


def test_the_order_depends_on_seed_and_epoch_alone():
    order = epoch_order(20, seed=3, epoch=5)
    assert sorted(order) == list(range(20))
    torch.manual_seed(1)
    assert epoch_order(20, seed=3, epoch=5) == order
    assert epoch_order(20, seed=3, epoch=6) != order
    assert epoch_order(20, seed=4, epoch=5) != order


def test_draws_by_weight():
    weights = [0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3]
    counts = Counter(i for epoch in range(1000) for i in epoch_order(4, seed=0, epoch=epoch, weights=weights))
    assert counts[0] / 4000 == pytest.approx(0.5, abs=0.03)
    assert counts[2] / 4000 == pytest.approx(0.5 / 3, abs=0.03)
    assert epoch_order(4, seed=0, epoch=1, weights=[0, 0, 1, 0]) == [2, 2, 2, 2]


def test_batches_come_in_order_and_whole(cohort):
    loader = BatchLoader(cohort, CPU, 8, needs_layout=True)
    groups = [cohort.samples[:2], cohort.samples[2:3], cohort.samples[3:]]
    packed = list(loader.batches(groups))
    assert [batch.ids for batch in packed] == [tuple(sample.id for sample in group) for group in groups]
    for batch, group in zip(packed, groups, strict=True):
        assert torch.equal(batch.features, torch.cat([cohort.load(sample).features for sample in group]))
        assert batch.layout.offsets == batch.offsets.tolist()
    assert loader.steps_um.keys() == set(cohort.ids)
    assert list(loader.batches([])) == []


def test_tiles_are_drawn_anew_in_each_epoch_and_the_same_ones_every_time(cohort):
    def drawn(seed, epoch, group=cohort.samples[:3]):
        loader = BatchLoader(cohort, CPU, 8, needs_layout=True)
        (batch,) = loader.batches([group], max_tiles=20, seed=seed, epoch=epoch)
        assert batch.layout.offsets == batch.offsets.tolist() == [20 * i for i in range(len(group) + 1)]
        return batch.features

    assert torch.equal(drawn(0, 1), drawn(0, 1))
    assert not torch.equal(drawn(0, 1), drawn(0, 2))
    assert not torch.equal(drawn(0, 1), drawn(1, 1))
    assert torch.equal(drawn(0, 1)[20:40], drawn(0, 1, cohort.samples[1:2]))  # whatever it is packed with


def test_layouts_are_kept_with_all_that_attention_has_found_out(cohort):
    loader = BatchLoader(cohort, CPU, 8, needs_layout=True)
    for _ in range(2):
        (batch,) = loader.batches([cohort.samples[:2]])
    (single,) = loader.batches([cohort.samples[1:2]])
    assert single.layout.bags[0] is batch.layout.bags[1]


def test_kept_layouts_are_bounded(cohort, monkeypatch):
    sizes = [cohort.load(sample).n for sample in cohort.samples]
    monkeypatch.setattr(batches, "KEPT_TILES", sizes[0] + sizes[1])
    loader = BatchLoader(cohort, CPU, 8, needs_layout=True)
    for _ in range(2):
        packed = list(loader.batches([sample] for sample in cohort.samples))
    assert sum(layout.n for layout in loader._layouts.values()) <= sizes[0] + sizes[1]
    assert [batch.layout.n for batch in packed] == sizes
    list(loader.batches([cohort.samples], max_tiles=5))
    assert all(layout.n > 5 for layout in loader._layouts.values())  # those of drawn tiles are of no use later


def test_slides_without_tiles(cohort):
    empty_one = replace(cohort, loader=Changed(cohort.loader, lambda bag: without_tiles(bag, bag.id == cohort.ids[1])))
    loader = BatchLoader(empty_one, CPU, 8, needs_layout=True)
    both, alone = loader.batches([cohort.samples[:2], cohort.samples[1:2]])
    assert both.offsets.diff().tolist()[1] == 0
    assert alone.features.shape == (0, 8)


def without_tiles(bag, yes):
    return replace(bag, features=torch.empty(0, 0), xy=torch.empty(0, 2), slides=torch.tensor([0, 0])) if yes else bag


def test_errors_of_the_thread_arrive(cohort):
    def fail(bag):
        if bag.id == cohort.ids[2]:
            raise DataError("slide.h5", "is damaged")
        return bag

    loader = BatchLoader(replace(cohort, loader=Changed(cohort.loader, fail)), CPU, 8, needs_layout=False)
    packed = loader.batches([sample] for sample in cohort.samples)
    assert [next(packed).ids, next(packed).ids] == [(cohort.ids[0],), (cohort.ids[1],)]
    with pytest.raises(DataError, match=r"slide\.h5: is damaged"):
        next(packed)


def test_features_of_another_width_are_refused_by_name(cohort):
    loader = BatchLoader(cohort, CPU, 9, needs_layout=False)
    with pytest.raises(DataError, match=f"{cohort.ids[0]}.*8 wide, the model takes 9"):
        list(loader.batches([cohort.samples[:1]]))


def test_a_batch_and_its_layout_are_on_the_device(cohort):
    loader = BatchLoader(cohort, torch.device("meta"), 8, needs_layout=True)
    (batch,) = loader.batches([cohort.samples[:2]])
    assert {batch.features.device.type, batch.xy.device.type, batch.layout.bags[0].xy.device.type} == {"meta"}
