import re
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.errors import DataError, OptionError
from psamil.lattice import place_tiles
from psamil.spatial import Layout


def grid(columns, rows, step=512, origin=(0, 0)):
    """(columns * rows, 2) corners of the tiles of a full lattice."""
    return np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2) * step + np.array(origin)


def share(coords, keep, seed=0):
    return coords[np.random.default_rng(seed).random(len(coords)) < keep]


def stamp(columns, rows, tile_um=256.0, mpp=0.2526, per_supertile=4):
    """Tiles are 256 µm apart inside a supertile, whole pixels between supertiles: a slow drift. Stored as float32."""
    supertile_um = np.ceil(tile_um / mpp) * mpp * per_supertile
    k = grid(columns, rows, 1)
    return (k // per_supertile * supertile_um + k % per_supertile * tile_um).astype(np.float32)


@dataclass
class Situation:
    coords: Any
    length: float
    source: str
    whole: bool = True  # positions are whole numbers
    phases: int = 1
    warning: str | None = None
    overlap: float | None = None
    duplicates: int = 0
    says: dict[str, Any] = field(default_factory=dict)  # metadata


FULL = grid(20, 15)
SPARSE = share(grid(60, 60), 0.05)
CHECKERBOARD = FULL[(FULL // 512).sum(1) % 2 == 0]
TWO_PHASES = np.concatenate([grid(12, 9), grid(7, 11, origin=(40 * 512 + 131, 77))])
TOUCHING = np.concatenate([grid(10, 10), grid(10, 10, origin=(8 * 512 + 100, 37))])  # two columns overlap
INTERLEAVED = np.concatenate([grid(10, 10), grid(10, 10, origin=(100, 37))])  # the nearest is of the other phase
NEAR_TWINS = np.concatenate([grid(10, 10), grid(10, 10, origin=(30, 4))])
FAR_PIECES = np.concatenate([grid(5, 4), grid(6, 3) + 300 * 512])
FOUR_APART = np.array([[0, 0], [4 * 512, 0]])
PX512 = dict(nominal_step=512, tile_size=512)
UM256 = dict(unit="um", nominal_step=256.0, tile_size=256.0)

SITUATIONS = {
    "metadata confirmed": Situation(FULL, 512, "metadata", overlap=0.0, says=PX512),
    "metadata as float": Situation(FULL, 512, "metadata", says=dict(nominal_step=np.float64(512.0))),
    "only the tile size known": Situation(FULL, 512, "metadata", overlap=0.0, says=dict(tile_size=512)),
    "no metadata": Situation(FULL, 512, "measured"),
    "int32": Situation(FULL.astype(np.int32), 512, "metadata", overlap=0.0, says=PX512),
    "float32": Situation(FULL.astype(np.float32), 512, "metadata", overlap=0.0, says=PX512),
    "declared overlap": Situation(
        grid(20, 15, 384), 384, "metadata", overlap=0.25, says=dict(nominal_step=384, tile_size=512)
    ),
    "undeclared overlap of half a tile": Situation(
        grid(20, 15, 256), 256, "measured", overlap=0.5, warning="256 level-0 px.*metadata say 512", says=PX512
    ),
    "undeclared gaps": Situation(FULL * 2, 1024, "measured", overlap=-1.0, warning="1024.*say 512", says=PX512),
    "size of half the magnification": Situation(
        FULL, 512, "measured", warning="512.*say 256", says=dict(nominal_step=256)
    ),
    "size of twice the magnification": Situation(
        FULL, 512, "measured", warning="512.*say 1024", says=dict(nominal_step=1024)
    ),
    "size along the diagonal": Situation(FULL, 512, "measured", warning="512.*say 724", says=dict(nominal_step=724)),
    "metadata of zero": Situation(FULL, 512, "measured", warning="give 0 as distance", says=dict(nominal_step=0)),
    "slow drift in float32 µm": Situation(stamp(90, 40), 256, "metadata", whole=False, overlap=0.0, says=UM256),
    "steps of 511 and 512 by turns": Situation(
        np.rint(grid(90, 40, 1) * 511.33), 511.33, "metadata", says=dict(nominal_step=511)
    ),
    "short steps rounded down, long rows": Situation(np.floor(grid(300, 9, 1) * 64.4), 64.4, "measured"),
    "µm that float32 cannot hold": Situation((grid(90, 40, 1) * 129.3312).astype(np.float32), 129.3312, "measured"),
    "a phase per tissue piece": Situation(TWO_PHASES, 512, "metadata", whole=False, phases=2, overlap=0.0, says=PX512),
    "a phase per piece, no metadata": Situation(TWO_PHASES, 512, "measured", whole=False, phases=2),
    "pieces that touch": Situation(TOUCHING, 512, "metadata", whole=False, phases=2, overlap=0.0, says=PX512),
    "pieces that overlap wholly": Situation(
        INTERLEAVED, 512, "metadata", whole=False, phases=2, overlap=0.0, says=PX512
    ),
    "pieces that overlap wholly, no metadata": Situation(INTERLEAVED, 512, "measured", whole=False, phases=2),
    "every tile with a near twin": Situation(NEAR_TWINS, 512, "measured", whole=False, phases=2),
    "pieces far apart": Situation(FAR_PIECES, 512, "metadata", overlap=0.0, says=PX512),
    "5 % of a lattice": Situation(SPARSE, 512, "sub-sampled lattice", overlap=0.0, says=PX512),
    "5 % of a lattice, no metadata": Situation(SPARSE, 512, "common divisor", warning="taken as 512.*do not say it"),
    "5 % of a lattice, metadata half": Situation(
        SPARSE, 512, "common divisor", warning="taken as 512.*say 256", says=dict(nominal_step=256)
    ),
    "5 % of a drifting lattice": Situation(
        share(stamp(60, 60), 0.05), 256, "sub-sampled lattice", whole=False, overlap=0.0, says=UM256
    ),
    "30 % of a lattice, no metadata": Situation(share(grid(20, 20), 0.3), 512, "measured"),
    "30 % of a lattice, metadata twice": Situation(
        share(grid(20, 20), 0.3), 512, "measured", warning="512.*say 1024", says=dict(nominal_step=1024)
    ),
    "checkerboard": Situation(CHECKERBOARD, 512, "metadata", overlap=0.0, says=PX512),
    "checkerboard, no metadata": Situation(CHECKERBOARD, 512, "measured"),
    "diagonal": Situation(np.arange(9)[:, None] * [512, 512], 512, "metadata", overlap=0.0, says=PX512),
    "diagonal, no metadata": Situation(np.arange(9)[:, None] * [512, -512], 512, "measured"),
    "one row": Situation(grid(30, 1), 512, "measured"),
    "one row, undeclared overlap": Situation(
        grid(30, 1, 256), 256, "measured", overlap=0.5, warning="256.*say 512", says=PX512
    ),
    "one column": Situation(grid(1, 30), 512, "metadata", overlap=0.0, says=PX512),
    "negative coordinates": Situation(FULL - 7000, 512, "measured"),
    "far from the origin": Situation(FULL + 1_000_003, 512, "measured"),
    "duplicates": Situation(np.concatenate([FULL, FULL[:20]]), 512, "measured", duplicates=20),
    "everything twice": Situation(
        np.concatenate([FULL, FULL]), 512, "measured", duplicates=300, warning="300 of 600 tiles share a position"
    ),
    "two neighbours": Situation(grid(2, 1), 512, "metadata", overlap=0.0, says=PX512),
    "two neighbours, no metadata": Situation(grid(2, 1), 512, "common divisor", warning="taken as 512"),
    "two neighbours in µm, no metadata": Situation(grid(2, 1, 99.5), 99.5, "measured", says=dict(unit="um")),
    "two tiles four steps apart": Situation(
        FOUR_APART, 512, "sub-sampled lattice", overlap=0.0, warning="2 tiles are too few to check", says=PX512
    ),
    "three pieces of one tile": Situation(
        np.array([[0, 0], [9001, 70], [333, 20011]]),
        512,
        "metadata",
        whole=False,
        phases=3,
        overlap=0.0,
        warning="3 tiles are too few to check.*say 512",
        says=PX512,
    ),
    "four tiles in a square": Situation(grid(2, 2), 512, "metadata", overlap=0.0, says=PX512),
    "one tile": Situation(np.array([[7168, 512]]), 512, "metadata", overlap=0.0, says=PX512),
    "one tile, no metadata": Situation(np.array([[7168, 512]]), 1, "single tile", warning="no distance needs it"),
    "one position": Situation(
        np.full((5, 2), 77), 512, "metadata", overlap=0.0, duplicates=4, warning="4 of 5", says=PX512
    ),
    "rows and columns": Situation(grid(20, 15, 1), 1, "metadata", says=dict(unit="steps")),
    "5 % of rows and columns": Situation(SPARSE // 512, 1, "sub-sampled lattice", says=dict(unit="steps")),
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_situation(situation):
    placed = place_tiles(situation.coords, name="slide.h5", **situation.says)
    step = placed.step
    assert (step.source, placed.duplicates, placed.phases) == (
        situation.source,
        situation.duplicates,
        situation.phases,
    )
    assert step.length == pytest.approx(situation.length, rel=2e-5)
    assert step.overlap == pytest.approx(situation.overlap, abs=1e-3)
    assert 0.5 <= step.support <= 1 or "too few" in str(placed.warnings)
    expected = situation.coords.astype(np.float64) - situation.coords.min(0)
    assert placed.xy.dtype == np.float64
    np.testing.assert_allclose(placed.xy, expected / situation.length, atol=0.03)
    assert bool((placed.xy == np.rint(placed.xy)).all()) == situation.whole
    assert len(placed.warnings) == (situation.warning is not None)
    if situation.warning:
        assert re.search(situation.warning, placed.warnings[0]), placed.warnings[0]
        assert placed.warnings[0].endswith(".")


def test_positions_keep_the_phase_of_a_piece():
    xy = place_tiles(TWO_PHASES, name="slide.h5", **PX512).xy
    offset = xy[108:] - xy[108:].round()
    np.testing.assert_allclose(offset, np.tile([131 / 512, 77 / 512], (77, 1)), atol=1e-12)


def test_a_phase_beyond_a_wide_gap_is_not_taken_for_rounding():
    coords = np.array([[0, 0], [20_000, 0], [20_000, 512]])  # 39.06 steps
    assert place_tiles(coords, name="slide.h5", **PX512).xy[1, 0] == 20_000 / 512


def test_few_scattered_pieces_do_not_agree_on_their_distance():
    coords = np.array([[0, 0], [0, 512], [20_000, 0], [21_536, 0], [42_560, 1537], [44_608, 1]])
    with pytest.raises(DataError, match="6 tiles"):
        place_tiles(coords, name="slide.h5")


def test_a_raster_of_phases_is_not_the_step():
    """Corners of tissue pieces found on a thumbnail are multiples of its downsampling: a divisor, but not the step."""
    pieces = np.random.default_rng(0).integers(0, 900, (30, 2)) * 64
    with pytest.raises(DataError, match=r"30 tiles.*metadata say 512"):
        place_tiles(pieces, name="slide.h5", **PX512)


def test_tiles_a_little_before_and_behind_their_place_are_of_one_phase():
    jittered = FULL + np.random.default_rng(0).integers(-9, 10, FULL.shape)
    jittered[0] = 0
    placed = place_tiles(jittered + 4000, name="slide.h5", nominal_step=512)
    assert (placed.phases, placed.step.source) == (1, "metadata")


def test_no_tiles():
    for coords in (np.empty((0, 2)), np.empty(0), []):
        placed = place_tiles(coords, name="slide.h5", nominal_step=512)
        assert (placed.xy.shape, placed.step.length, placed.duplicates, placed.warnings) == ((0, 2), 512, 0, ())
    assert place_tiles([], name="slide.h5").step.source == "no tiles"


def test_a_lone_tile_without_metadata_claims_no_micrometres():
    assert place_tiles([[512, 512]], name="slide.h5", mpp=0.25).step.um is None
    assert place_tiles([[512, 512]], name="slide.h5", mpp=0.25, tile_size=512).step.um == 128


@pytest.mark.parametrize("name", ["metadata confirmed", "steps of 511 and 512 by turns", "µm that float32 cannot hold"])
def test_attention_takes_its_fast_path_on_a_single_lattice(name):
    situation = SITUATIONS[name]
    xy = place_tiles(situation.coords, name=name, **situation.says).xy
    assert Layout.of(torch.from_numpy(xy)).bags[0].lattice is not None


def test_cells_are_spaced_by_the_distance_to_the_nearest():
    cells = np.random.default_rng(0).random((2000, 2)) * 1000
    d = np.sqrt(((cells[:, None] - cells) ** 2).sum(-1)) + np.diag(np.full(2000, np.inf))
    placed = place_tiles(np.concatenate([cells, cells[:3]]), name="cells.csv", unit="um", continuous=True)
    assert (placed.step.source, placed.phases, placed.duplicates, placed.step.overlap) == ("spacing", None, 3, None)
    assert placed.step.um == pytest.approx(np.median(d.min(1)))
    np.testing.assert_allclose(placed.xy[:2000] * placed.step.length, cells - cells.min(0), atol=1e-9)
    spots = place_tiles(cells, name="cells.csv", unit="um", continuous=True, nominal_step=100.0, tile_size=55.0)
    assert (spots.step.source, spots.step.length) == ("metadata", 100.0)


def test_cells_that_pass_for_tiles_are_refused_with_a_remedy():
    cells = np.random.default_rng(0).integers(0, 9000, (400, 2))
    with pytest.raises(DataError) as refused:
        place_tiles(cells, name="cells.csv", nominal_step=300)
    message = str(refused.value)
    assert message.startswith("cells.csv: ")
    assert message.count("of the tiles)") == 3
    for part in ("400 tiles", "level-0 px", "metadata say 300", "`step=`", "`continuous=True`"):
        assert part in message


def test_the_user_is_obeyed_and_told():
    placed = place_tiles(FULL, name="slide.h5", nominal_step=256, given_step=512, tile_size=640, mpp=0.25)
    assert (placed.step.source, placed.step.length, placed.step.support) == ("given", 512, 1.0)
    assert (placed.step.overlap, placed.step.um, placed.warnings) == (pytest.approx(0.2), 128, ())
    placed = place_tiles(FULL, name="slide.h5", given_step=700)
    assert placed.xy.max() == pytest.approx(19 * 512 / 700)
    assert "0% of the tiles have a neighbour at the given step of 700" in placed.warnings[0]
    assert "512" in placed.warnings[0]
    cells = np.random.default_rng(0).random((50, 2))
    assert place_tiles(cells, name="cells.csv", given_step=0.1, continuous=True).step.support == 1.0
    assert place_tiles([[3, 4]], name="slide.h5", given_step=0.1).step.length == 0.1


def test_physical_positions():
    for coords, says in ((FULL, dict(mpp=0.25)), (FULL * 0.25, dict(unit="um"))):
        placed = place_tiles(coords, name="slide.h5", um_per_step=64.0, nominal_step=300, **says)
        np.testing.assert_array_equal(placed.xy, FULL // 256)
        assert (placed.step.length, placed.step.unit, placed.step.um) == (64.0, "um", 64.0)
        assert (placed.step.source, placed.step.mpp, placed.phases) == ("given", says.get("mpp"), None)
    cells = np.random.default_rng(0).random((50, 2)) * 100  # no lattice is needed
    np.testing.assert_allclose(
        place_tiles(cells, name="cells.csv", unit="um", um_per_step=10).xy, (cells - cells.min(0)) / 10
    )


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({}, r"level-0 pixel is unknown; give micrometres per pixel with `mpp=`"),
        (dict(mpp=0.0), r"level-0 pixel is unknown"),
        (dict(unit="px", mpp=0.25), r"coordinates are in px; give micrometres per pixel with `mpp=`"),
        (dict(unit="steps", mpp=0.25), r"coordinates are in steps"),
    ],
)
def test_physical_positions_need_micrometres(says, message):
    with pytest.raises(DataError, match=r"slide.h5: .*micrometres.*" + message):
        place_tiles(FULL, name="slide.h5", um_per_step=100, **says)


def test_coordinates_that_are_none():
    coords = FULL.astype(float)
    coords[3, 0], coords[5, 1], coords[5, 0] = np.nan, np.inf, np.nan
    with pytest.raises(DataError, match=r"slide.h5: 2 of 300 tiles have NaN or infinite coordinates; extract"):
        place_tiles(coords, name="slide.h5")
    with pytest.raises(DataError, match=r"slide.h5: coordinates must be \(n, 2\), got \(300, 3\)"):
        place_tiles(np.zeros((300, 3)), name="slide.h5")


@pytest.mark.parametrize("option", ["given_step", "um_per_step"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_options_are_lengths(option, value):
    with pytest.raises(OptionError, match="step must be a positive length"):
        place_tiles(FULL, name="slide.h5", mpp=0.25, **{option: value})


def test_two_definitions_of_a_step_are_refused():
    with pytest.raises(OptionError, match="cannot both be given"):
        place_tiles(FULL, name="slide.h5", mpp=0.25, given_step=512, um_per_step=100)


@pytest.mark.parametrize("keep", [0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_samples_of_a_lattice_never_mislead(keep):
    for seed in range(10):
        coords = share(grid(30, 30), keep, seed)
        assert place_tiles(coords, name="slide.h5", nominal_step=512).step.length == 512
        assert place_tiles(coords, name="slide.h5").step.length == 512
        for wrong in (256, 300, 1024):
            try:
                placed = place_tiles(coords, name="slide.h5", nominal_step=wrong)
            except DataError:
                continue
            assert placed.step.length == 512 or len(coords) < 16
            assert placed.warnings


def test_the_input_is_not_changed():
    coords = FULL.astype(np.float64) + 5
    before = coords.copy()
    place_tiles(coords, name="slide.h5").xy[:] = -1
    np.testing.assert_array_equal(coords, before)


def test_large_bags_are_quick():
    coords = np.concatenate([grid(400, 250), grid(400, 250, origin=(401 * 512 + 77, 13))])
    start = time.process_time()
    placed = place_tiles(coords, name="slide.h5", **PX512)
    assert time.process_time() - start < 5  # about 0.5 s on an idle machine
    assert (placed.step.source, placed.step.length, placed.phases) == ("metadata", 512, 2)


cells_of_lattice = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=2, max_size=60)
pieces = st.lists(st.tuples(cells_of_lattice, st.integers(0, 511), st.integers(0, 511)), min_size=1, max_size=3)


def coords_of(pieces):
    parts = [np.array(cells) * 512 + [20_000 * i + dx, dy] for i, (cells, dx, dy) in enumerate(pieces)]
    return np.concatenate(parts).astype(np.float64)


def outcome(coords, **says):
    """Positions and step, or None where the bag is refused."""
    try:
        return place_tiles(coords, name="slide.h5", **says)
    except DataError:
        return None


def assert_same(a, b, scale=1.0, rows=slice(None)):
    assert (a is None) == (b is None)
    if a is not None:
        np.testing.assert_allclose(b.xy, a.xy[rows], atol=1e-9)
        assert b.step.length == pytest.approx(a.step.length * scale, rel=1e-12)
        assert (b.step.source, b.step.support, b.duplicates) == (a.step.source, a.step.support, a.duplicates)
        assert (b.phases, len(b.warnings)) == (a.phases, len(a.warnings))


@settings(max_examples=60, deadline=None)
@given(pieces=pieces, seed=st.integers(0, 99), nominal=st.sampled_from([None, 512]))
def test_the_order_of_tiles_does_not_matter(pieces, seed, nominal):
    coords = coords_of(pieces)
    order = np.random.default_rng(seed).permutation(len(coords))
    assert_same(outcome(coords, nominal_step=nominal), outcome(coords[order], nominal_step=nominal), rows=order)


@settings(max_examples=60, deadline=None)
@given(pieces=pieces, shift=st.tuples(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6)))
def test_the_origin_does_not_matter(pieces, shift):
    coords = coords_of(pieces)
    assert_same(outcome(coords, nominal_step=512), outcome(coords + shift, nominal_step=512))


@settings(max_examples=60, deadline=None)
@given(pieces=pieces, scale=st.sampled_from([2, 3, 4, 7, 16]))
def test_the_magnification_does_not_matter(pieces, scale):
    coords = coords_of(pieces) // 16 * 16  # away from rounded pixels, which are a length of their own
    a, b = outcome(coords, nominal_step=512), outcome(coords * scale, nominal_step=512 * scale)
    assert_same(a, b, scale)


@settings(max_examples=60, deadline=None)
@given(cells=cells_of_lattice, step=st.floats(40, 4000), origin=st.floats(-1e5, 1e5))
def test_true_metadata_put_a_single_lattice_on_whole_steps(cells, step, origin):
    k = np.array(cells)
    placed = place_tiles(k * step + origin, name="slide.h5", nominal_step=step)
    if placed.step.source != "measured":  # few tiles can form a coarser lattice of their own
        np.testing.assert_array_equal(placed.xy, k - k.min(0))
