"""Slides: pixels at any resolution, places, micrometres per pixel, and files that cannot be used."""

import os
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from psamil.errors import DataError, OptionError
from psamil.slides import sources
from psamil.slides.slide import find_slides, open_slide
from psamil.slides.sources import ImageSource, OpenSlideSource, TiffSource
from tests.real_data import DATA
from tests.slides.drawn import halved, stained, wave_values, waves, write_offset_slide, write_slide

SLIDES = DATA / "wsi"


@pytest.fixture(scope="module")
def grainy(tmp_path_factory):
    image = stained(600, 700)
    return image, write_slide(tmp_path_factory.mktemp("grainy") / "grainy.tif", image)


@pytest.fixture(scope="module")
def wavy(tmp_path_factory):
    """Its levels leave out what does not fill a pixel: 1001, 500 and 250 px are 1, 2 and 4 times as large."""
    return write_slide(tmp_path_factory.mktemp("wavy") / "wavy.tif", waves(903, 1001), levels=3)


def test_facts(grainy):
    with open_slide(grainy[1]) as slide:
        assert (slide.name, slide.path) == ("grainy", grainy[1])
        assert slide.size_px0 == (700, 600)
        assert slide.bounds_px0 == (0, 0, 700, 600)
        assert slide.mpp_px0 == pytest.approx(0.5)
        assert slide.level_count == 2


@pytest.mark.parametrize(("mpp", "x", "y"), [(0.5, 0, 0), (0.5, 133, 77), (1.0, 0, 0), (1.0, 132, 78)])
def test_pixels_of_a_level_stay_as_they_are(grainy, mpp, x, y):
    image, path = grainy
    k = round(mpp / 0.5)
    expected = (image if k == 1 else halved(image))[y // k : y // k + 96, x // k : x // k + 96]
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(x, y, 96, mpp), expected)


@pytest.mark.parametrize("mpp", [0.5, 0.6137, 0.77, 1.0, 1.31, 2.0, 2.9, 5.3])
@pytest.mark.parametrize(("x", "y"), [(200, 100), (223, 131), (200.4, 100.7), (570, 470)])
def test_any_resolution_at_any_place(wavy, mpp, x, y):
    ratio, size = mpp / 0.5, 40
    places = (np.arange(size) + 0.5) * ratio
    with open_slide(wavy) as slide:
        got = slide.read(x, y, size, mpp)
    expected = wave_values(x + places, y + places)
    error = np.abs(got.astype(int) - expected)
    assert error.max() <= 2
    assert error.mean() <= 0.52  # a shift by half a level-0 pixel makes 0.7


@pytest.mark.parametrize("mpp", [0.7, 1.3, 4.1])
def test_neighbours_fit_together(wavy, mpp):
    size = 30
    step = size * mpp / 0.5
    with open_slide(wavy) as slide:
        both = slide.read(100, 100, 2 * size, mpp)
        right = slide.read(100 + step, 100, size, mpp)
        below = slide.read(100, 100 + step, size, mpp)
    assert np.abs(both[:size, size:].astype(int) - right).max() <= 2
    assert np.abs(both[size:, :size].astype(int) - below).max() <= 2


@pytest.mark.parametrize("mpp", [0.5, 0.8, 1.0, 3.0])
def test_white_outside(grainy, mpp):
    with open_slide(grainy[1]) as slide:
        k = mpp / 0.5
        left = slide.read(-40 * k, 40, 60, mpp)
        right = slide.read(700 - 20 * k, 600 - 20 * k, 60, mpp)
        nowhere = slide.read(5000, 5000, 60, mpp)
    assert (left[:, :34] == 255).all()
    assert (left[:, 44:].min(2) < 240).all()
    assert (right[26:] == 255).all()
    assert (right[:, 26:] == 255).all()
    assert (right[:16, :16].min(2) < 240).all()
    assert (nowhere == 255).all()


def test_overview(wavy):
    with open_slide(wavy) as slide:
        overview = slide.overview(5.0)
        assert overview.shape == (90, 100, 3)
        expected = wave_values((np.arange(100) + 0.5) * 10.01, (np.arange(90) + 0.5) * 903 / 90)
        assert np.abs(overview.astype(int) - expected).max() <= 8  # also at the border: nothing white is mixed in
        again = slide.overview(10.0)  # made from the first
        assert again.shape == (45, 50, 3)
        assert np.abs(again.astype(int) - slide._read(0, 0, 50, 45, 20.02, 903 / 45)).max() <= 8
        assert slide.overview(2.5).shape == (181, 200, 3)


def test_pieces_of_an_overview_fit_together(wavy, monkeypatch):
    with open_slide(wavy) as slide:
        whole = slide.overview(3.3).astype(int)
    monkeypatch.setattr("psamil.slides.slide.PIECE_PX", (37, 21))
    with open_slide(wavy) as slide:
        assert np.abs(slide.overview(3.3) - whole).max() <= 4  # between pixels of a level, OpenSlide interpolates


def test_large_regions_are_read_in_blocks(grainy, monkeypatch):
    with open_slide(grainy[1]) as slide:
        whole = slide._read(0, 0, 51, 44, 13.7, 13.6)
        monkeypatch.setattr("psamil.slides.slide.BLOCK_PX", 64)
        np.testing.assert_array_equal(slide._read(0, 0, 51, 44, 13.7, 13.6), whole)


def test_scanned_area_with_an_offset(tmp_path):
    image = stained(512, 768)
    path = write_offset_slide(tmp_path / "offset.scn", image, (1000, 600), (4096, 2048))
    with open_slide(path) as slide:
        assert slide.size_px0 == (4096, 2048)
        assert slide.bounds_px0 == (1000, 600, 768, 512)
        assert slide.mpp_px0 == pytest.approx(0.5)
        np.testing.assert_array_equal(slide.read(1100, 700, 64, 0.5), image[100:164, 100:164])
        assert (slide.read(0, 0, 64, 0.5) == 255).all()  # transparent in the file
        corner = slide.read(1000 - 32, 600 - 32, 64, 0.5)
        np.testing.assert_array_equal(corner[32:, 32:], image[:32, :32])
        assert (corner[:32] == 255).all()
        assert (corner[:, :32] == 255).all()


# Micrometres per pixel


def test_given_mpp_wins(grainy):
    with open_slide(grainy[1], mpp=0.25) as slide:
        assert slide.mpp_px0 == 0.25


@pytest.mark.parametrize("mpp", [0, -1, float("nan"), float("inf"), 40, 0.001])
def test_impossible_mpp(grainy, mpp):
    with pytest.raises(OptionError, match=r"mpp is in micrometres per pixel, between 0\.02 and 20"):
        open_slide(grainy[1], mpp=mpp)


@pytest.mark.parametrize(
    ("resolution", "unit", "cause"),
    [
        ((1, 1), "NONE", "does not say how large its pixels are"),
        ((20000, 20000), "NONE", "does not say how large its pixels are"),
        ((72, 72), "INCH", "352.778 x 352.778 um"),
        ((20000, 19000), "CENTIMETER", "not square: 0.5 x 0.526"),
    ],
    ids=["unknown", "no unit", "printing", "not square"],
)
def test_mpp_is_not_guessed(tmp_path, resolution, unit, cause):
    image = stained(256, 256)
    path = write_slide(tmp_path / "a.tif", image, mpp=None, resolution=resolution, resolutionunit=unit)
    with pytest.raises(DataError, match=cause) as caught:
        open_slide(path)
    assert "--mpp 0.5" in str(caught.value)
    with open_slide(path, mpp=0.5) as slide:
        np.testing.assert_array_equal(slide.read(8, 8, 32, 0.5), image[8:40, 8:40])


def test_unit_that_is_not_there_is_not_inches(tmp_path):
    path = write_slide(tmp_path / "a.tif", stained(256, 256), mpp=0.5)
    with tifffile.TiffFile(path, mode="r+") as file:
        tag = file.pages[0].tags["ResolutionUnit"]
        file.filehandle.seek(tag.offset)
        file.filehandle.write((65000).to_bytes(2, "little"))  # another tag in its place
    assert "openslide.mpp-x" in openslide.OpenSlide(path).properties
    with pytest.raises(DataError, match="does not say"):
        open_slide(path)


def test_slightly_different_sides_are_averaged(tmp_path):
    options = dict(resolution=(20000, 19900), resolutionunit="CENTIMETER")
    path = write_slide(tmp_path / "a.tif", stained(256, 256), mpp=None, **options)
    with open_slide(path) as slide:
        assert slide.mpp_px0 == pytest.approx((0.5 + 10000 / 19900) / 2)


def test_objective_power_is_a_hint_and_no_answer(grainy, monkeypatch):
    properties = {"openslide.objective-power": "40"}
    monkeypatch.setattr(openslide.OpenSlide, "properties", properties)
    monkeypatch.setattr(sources, "tiff_facts", lambda file: {"objective-power": "40"})
    with pytest.raises(DataError, match=r"objective power is 40.*--mpp"):
        open_slide(grainy[1])


# Large images that are no slides


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_tiff_in_strips(tmp_path, monkeypatch, compression, planar):
    image = stained(300, 410)
    data = image if planar == "contig" else np.moveaxis(image, 2, 0)
    tifffile.imwrite(
        tmp_path / "strips.tif",
        data,
        photometric="rgb",
        planarconfig=planar,
        rowsperstrip=37,
        compression=compression,
        predictor=compression is not None,
        resolution=(25400 * 2, 25400 * 2),
        resolutionunit="INCH",
    )
    monkeypatch.setattr(sources, "CACHE_BYTES", 100_000)  # fewer than there are
    with open_slide(tmp_path / "strips.tif") as slide:
        assert isinstance(slide._source, TiffSource)
        assert slide.mpp_px0 == pytest.approx(0.5)
        for x, y in [(0, 0), (101, 33), (300, 200)]:
            np.testing.assert_array_equal(slide.read(x, y, 100, 0.5), image[y : y + 100, x : x + 100])
        assert (slide.read(-50, -50, 50, 0.5) == 255).all()
        assert slide._source._cached_bytes <= 100_000


@pytest.mark.parametrize("kind", ["unassalpha", "assocalpha", "unspecified"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_transparent_tiff_is_on_white(tmp_path, kind, planar):
    colours, opacity = stained(64, 80).astype(int), np.full((64, 80, 1), 255)
    opacity[:, 20:50], opacity[:, 50:] = 100, 0
    stored = colours * opacity // 255 if kind == "assocalpha" else colours
    data = np.dstack([stored, opacity]).astype(np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif",
        data if planar == "contig" else np.moveaxis(data, 2, 0),
        photometric="rgb",
        planarconfig=planar,
        extrasamples=[kind],
        rowsperstrip=16,
    )
    with open_slide(tmp_path / "a.tif", mpp=0.5) as slide:
        assert isinstance(slide._source, TiffSource)
        read = slide.read(0, 0, 64, 0.5).astype(int)
    expected = colours if kind == "unspecified" else (colours * opacity + 255 * (255 - opacity)) / 255
    assert np.abs(read - expected[:, :64]).max() <= (1 if kind != "unspecified" else 0)


def test_transparent_grey_tiff_is_on_white(tmp_path):
    data = np.full((64, 64, 2), 90, np.uint8)
    data[..., 1] = np.where(np.arange(64) < 30, 255, 0)
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="minisblack", planarconfig="contig", extrasamples=[2])
    with open_slide(tmp_path / "a.tif", mpp=0.5) as slide:
        read = slide.read(0, 0, 64, 0.5)
    assert (read[:, :30] == 90).all()
    assert (read[:, 30:] == 255).all()


@pytest.mark.parametrize("name", ["a.ome.tif", "a.tif"])
def test_levels_of_ome_tiff(tmp_path, name):
    image = stained(512, 600)
    metadata = {"axes": "YXS", "PhysicalSizeX": 250, "PhysicalSizeXUnit": "nm"}
    metadata |= {"PhysicalSizeY": 0.25, "PhysicalSizeYUnit": "µm"}
    with tifffile.TiffWriter(tmp_path / name, ome=True) as file:
        options = dict(tile=(128, 128), photometric="rgb", compression="zlib")
        file.write(image, subifds=1, metadata=metadata, **options)
        file.write(halved(image), subfiletype=1, metadata=None, **options)
    with open_slide(tmp_path / name) as slide:
        assert (slide.name, slide.mpp_px0, slide.level_count) == ("a", pytest.approx(0.25), 2)
        np.testing.assert_array_equal(slide.read(140, 60, 90, 0.25), image[60:150, 140:230])
        np.testing.assert_array_equal(slide.read(140, 60, 90, 0.5), halved(image)[30:120, 70:160])


def test_stack_of_channels_is_refused(tmp_path):
    tifffile.imwrite(tmp_path / "stack.ome.tif", np.zeros((4, 64, 64), np.uint8), metadata={"axes": "CYX"})
    with pytest.raises(DataError, match=r"stack of images \(CYX\)"):
        open_slide(tmp_path / "stack.ome.tif", mpp=0.5)


def test_sixteen_bits_are_refused(tmp_path):
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((64, 64), np.uint16))
    with pytest.raises(DataError, match="convert it to 8 bits"):
        open_slide(tmp_path / "deep.tif", mpp=0.5)


def test_image(tmp_path):
    pixels = np.dstack([stained(100, 120), np.full((100, 120), 255, np.uint8)])
    pixels[:, 60:, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="--mpp"):
        open_slide(tmp_path / "a.png")
    with open_slide(tmp_path / "a.png", mpp=0.5) as slide:
        assert isinstance(slide._source, ImageSource)
        read = slide.read(0, 0, 100, 0.5)
        np.testing.assert_array_equal(read[:, :60], pixels[:, :60, :3])
        assert (read[:, 60:] == 255).all()


def test_grey_image(tmp_path):
    grey = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)
    tifffile.imwrite(tmp_path / "grey.tif", grey)
    with open_slide(tmp_path / "grey.tif", mpp=1) as slide:
        np.testing.assert_array_equal(slide.read(0, 0, 64, 1), np.repeat(grey[..., None], 3, axis=2))


def test_too_large_to_be_held(tmp_path, monkeypatch):
    Image.fromarray(stained(100, 120)).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "a.tif", stained(100, 120), rowsperstrip=100)
    monkeypatch.setattr(sources, "LARGEST_IMAGE_PX", 5_000)
    for name in ("a.png", "a.tif"):
        with pytest.raises(DataError, match="vips tiffsave"):
            open_slide(tmp_path / name, mpp=0.5)


# Files that cannot be used


@pytest.mark.parametrize("name", ["a.svs", "a.tif", "a.png", "a.ndpi", "a.mrxs", "a.dcm"])
def test_text_with_the_name_of_a_slide(tmp_path, name):
    (tmp_path / name).write_text("not a slide\n" * 100)
    with pytest.raises(DataError, match=r"a\.\w+: .*(no slide or image|damaged)"):
        open_slide(tmp_path / name, mpp=0.5)


def test_empty_and_missing_file(tmp_path):
    (tmp_path / "a.svs").touch()
    with pytest.raises(DataError, match="no slide or image"):
        open_slide(tmp_path / "a.svs")
    with pytest.raises(DataError, match="No such file"):
        open_slide(tmp_path / "b.svs")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["tiled", "strips", "png"])
def test_truncated_file(tmp_path, kind, share):
    image = stained(600, 700)
    path = tmp_path / ("a.png" if kind == "png" else "a.tif")
    if kind == "tiled":
        write_slide(path, image, levels=1)
    elif kind == "strips":
        tifffile.imwrite(path, image, compression="zlib", rowsperstrip=50)
    else:
        Image.fromarray(image).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"damaged|incomplete|no slide or image"), open_slide(path, mpp=0.5) as slide:
        slide.overview(1.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about tags
@pytest.mark.parametrize("kind", ["tiled", "strips", "ome", "lzw"])
def test_damaged_bytes_give_one_line_or_pixels(tmp_path, kind, capfd):
    image, path = stained(100, 120), tmp_path / ("a.ome.tif" if kind == "ome" else "a.tif")
    if kind == "tiled":
        write_slide(path, image)
    elif kind == "lzw":
        Image.fromarray(image).save(path, compression="tiff_lzw")
    else:
        options = dict(metadata={"axes": "YXS"}) if kind == "ome" else {}
        tifffile.imwrite(path, image, photometric="rgb", compression="zlib", rowsperstrip=30, **options)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(25):
        damaged = bytearray(content)
        for place in (*rng.integers(0, 400, 3), *rng.integers(len(content) - 400, len(content), 2)):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            with open_slide(path, mpp=0.5) as slide:
                assert slide.read(10, 10, 64, 0.7).shape == (64, 64, 3)
        except DataError:
            refused += 1
    assert refused > 0


def test_compression_that_only_pillow_decodes(tmp_path):
    image = stained(100, 120)
    Image.fromarray(image).save(tmp_path / "a.tif", compression="tiff_lzw", dpi=(50800, 50800))
    with open_slide(tmp_path / "a.tif") as slide:
        assert isinstance(slide._source, ImageSource)
        assert slide.mpp_px0 == pytest.approx(0.5)
        np.testing.assert_array_equal(slide.read(20, 0, 100, 0.5), image[:, 20:])


# Finding slides


def test_find_slides(tmp_path):
    names = ["b.svs", "a/x.1.SVS", "a/preview.jpg", "m.mrxs", "m/Slidedat.ini", "m/inner.tif", "a/.hidden.svs", "n.txt"]
    names += ["series/1.dcm", "series/2.dcm", ".trash/t.svs"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in find_slides(tmp_path)]
    assert found == ["a/x.1.SVS", "b.svs", "m.mrxs", "series"]
    assert find_slides(tmp_path / "a" / "preview.jpg") == [tmp_path / "a" / "preview.jpg"]


def test_find_images_where_there_is_nothing_else(tmp_path):
    for name in ("a.png", "b.jpeg"):
        (tmp_path / name).touch()
    assert [path.name for path in find_slides(tmp_path)] == ["a.png", "b.jpeg"]


def test_find_no_slides(tmp_path):
    with pytest.raises(DataError, match="has no slides"):
        find_slides(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        find_slides(tmp_path / "a")


def test_two_slides_of_one_name(tmp_path):
    for name in ("x/a.svs", "y/a.ndpi"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"a\.svs: has the same name as .*a\.ndpi"):
        find_slides(tmp_path)


def test_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    (tmp_path / "a.svs").touch()
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    monkeypatch.setattr(os, "listdir", refusing)
    assert find_slides(tmp_path) == [tmp_path / "a.svs", tmp_path / "closed"]
    with pytest.raises(DataError, match="Permission denied"):
        open_slide(tmp_path / "closed")


def test_linked_folders_are_followed_and_loops_are_not(tmp_path):
    inside, outside = tmp_path / "slides", tmp_path / "disk"
    for folder, name in ((inside / "x", "a.svs"), (outside / "batch", "b.svs")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    (inside / "linked").symlink_to(outside)
    (outside / "batch" / "back").symlink_to(inside)
    (inside / "again").symlink_to(inside / "x")  # whose slide would otherwise have the name of another
    (inside / "x" / "loop").symlink_to(inside / "x")
    assert find_slides(inside) == [inside / "linked" / "batch" / "b.svs", inside / "x" / "a.svs"]


def dicom_head(series, sop_class="1.2.840.10008.5.1.4.1.1.77.1.6", vr=b"UI"):
    """As much of a file as says what it is, with a reference to another series of a slide."""

    def element(group, number, uid, vr=vr):
        value = uid.encode() + b"\0" * (len(uid) % 2)
        length = len(value).to_bytes(2 if vr else 4, "little")
        return group.to_bytes(2, "little") + number.to_bytes(2, "little") + vr + length + value

    referred = element(8, 0x1150, "1.2.840.10008.5.1.4.1.1.77.1.6")
    referred += element(0x20, 0x0E, "1.2.9") + element(0x20, 0x0D, "1.2.8")
    own = element(0x20, 0x0D, "1.2.3") + element(0x20, 0x0E, series)
    return bytes(128) + b"DICM" + element(2, 2, sop_class, b"UI") + referred + own + bytes(1000)


@pytest.mark.parametrize("vr", [b"UI", b""], ids=["explicit", "implicit"])
def test_two_series_in_one_folder_are_refused(tmp_path, vr):
    for i, series in enumerate(["1.2.3.45", "1.2.3.45", "1.2.3.6"]):
        (tmp_path / f"{i}.dcm").write_bytes(dicom_head(series, vr=vr))
    with pytest.raises(DataError, match=r"holds 2 DICOM series of slides \(1.2.3.45, 1.2.3.6\); give each a folder"):
        open_slide(tmp_path, mpp=0.5)


def test_what_lies_beside_a_series_is_no_second_one(tmp_path):
    (tmp_path / "0.dcm").write_bytes(dicom_head("1.2.3.45"))
    (tmp_path / "1.dcm").write_bytes(dicom_head("1.2.3.6", sop_class="1.2.840.10008.5.1.4.1.1.91.1"))  # annotations
    (tmp_path / "2.dcm").write_text("notes")
    with pytest.raises(DataError, match=r"no slide or image|damaged"):  # not because of its neighbours
        open_slide(tmp_path, mpp=0.5)


def test_folder_without_a_series(tmp_path):
    with pytest.raises(DataError, match="folder without a DICOM series"):
        open_slide(tmp_path)


# Real slides


@pytest.mark.skipif(not SLIDES.is_dir(), reason="no data folder; PSAMIL_DATA names it")
@pytest.mark.parametrize(
    ("name", "mpp"), [("CMU-1-Small-Region.svs", None), ("TCGA-CR-7395-01A-01-TS1.svs", 0.5)], ids=["cmu", "tcga"]
)
def test_real_slide_at_its_own_resolution(name, mpp):
    reference = openslide.OpenSlide(SLIDES / name)
    with open_slide(SLIDES / name, mpp) as slide:
        assert isinstance(slide._source, OpenSlideSource)
        for x, y in [(0, 0), (500, 700), (1701, 1203)]:
            expected = np.asarray(reference.read_region((x, y), 0, (224, 224)).convert("RGB"))
            np.testing.assert_array_equal(slide.read(x, y, 224, slide.mpp_px0), expected)


@pytest.mark.skipif(not SLIDES.is_dir(), reason="no data folder; PSAMIL_DATA names it")
def test_real_slide_without_mpp():
    with pytest.raises(DataError, match=r"TCGA-CR-7395.*does not say how large its pixels are.*--mpp 0\.5"):
        open_slide(SLIDES / "TCGA-CR-7395-01A-01-TS1.svs")
