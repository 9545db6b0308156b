"""The embedded encoder, what every encoder does, and the user's own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn

from psamil.errors import DataError, MissingExtraError, OptionError, ShapeError
from psamil.slides.encoders import EncoderCard, Preprocessing, list_encoders, load_encoder, register_encoder, registry
from psamil.slides.encoders.embedded import EfficientNetLite0
from tests.real_data import DATA

SVS = DATA / "wsi" / "CMU-1-Small-Region.svs"
NOISE = np.random.default_rng(5).integers(0, 256, (3, 96, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def lite0():
    return load_encoder("efficientnet-lite0")


def test_embedded(lite0):
    assert (lite0.name, lite0.dim, lite0.input_px, lite0.licence) == ("efficientnet-lite0", 1280, 224, "Apache-2.0")
    assert lite0.reference == "efficientnet-lite0"
    # of these weights and this preprocessing: another one means other features
    assert lite0.fingerprint == "319bdeda3eecea3ebf7db58f5486191cd69e862f4c347ec8e6d02267b0959bc5"


def test_faster_form_gives_the_same_features(lite0):
    """The published network, normalised by hand as its authors do: (x - 127) / 128."""
    tiles = np.random.default_rng(1).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    images = (torch.tensor(tiles).permute(0, 3, 1, 2).float() - 127) / 128
    with torch.inference_mode():
        expected = EfficientNetLite0().eval()(images)
    features = lite0.encode(tiles)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


def test_tiles_do_not_see_one_another(lite0):
    together = lite0.encode(NOISE)
    alone = torch.cat([lite0.encode(torch.tensor(tile[None])) for tile in NOISE])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert lite0.encode(NOISE[:0]).shape == (0, 1280)


def test_mixed_precision(lite0):
    mixed = load_encoder("efficientnet-lite0", precision="bfloat16")
    similar = torch.cosine_similarity(mixed.encode(NOISE), lite0.encode(NOISE))
    assert mixed.encode(NOISE).dtype == torch.float32
    assert 0.99 < similar.min() < 1
    assert mixed.fingerprint == lite0.fingerprint


@pytest.mark.skipif(not SVS.is_file(), reason="no data folder; PSAMIL_DATA names it")
def test_neighbours_in_feature_space_look_alike(lite0):
    """Tiles of real tissue: the nearest neighbour has a similar share of background, and lies nearer than chance."""
    openslide = pytest.importorskip("openslide")
    slide = openslide.OpenSlide(str(SVS))
    width, height = slide.dimensions
    places = [(x, y) for y in range(0, height - 447, 448) for x in range(0, width - 447, 448)]
    tiles = np.stack([np.asarray(slide.read_region(xy, 0, (448, 448)).convert("RGB"))[::2, ::2] for xy in places])
    features = lite0.encode(tiles)
    features = nn.functional.normalize(features - features.mean(0), dim=1)
    nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
    white = (tiles.min(-1) > 210).mean((1, 2))
    assert np.corrcoef(white, white[nearest])[0, 1] > 0.6
    steps = torch.cdist(torch.tensor(places).float(), torch.tensor(places).float()) / 448
    assert steps[torch.arange(len(places)), nearest].mean() < 0.8 * steps[steps > 0].mean()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("px", [60, 96, 130])
def test_resizing_as_image_libraries_do(interpolation, px):
    how = Preprocessing(px, mean=(0, 0, 0), std=(1 / 255,) * 3, interpolation=interpolation)
    smooth = gaussian_filter(NOISE.astype(float), (0, 2, 2, 0))
    smooth = np.interp(smooth, (smooth.min(), smooth.max()), (0, 255)).astype(np.uint8)
    images = how(torch.tensor(smooth)).permute(0, 2, 3, 1)
    method = getattr(Image.Resampling, interpolation.upper())
    resized = np.stack([np.asarray(Image.fromarray(tile).resize((px, px), method)) for tile in smooth])
    difference = (images - torch.tensor(resized).float()).abs()
    assert difference.max() <= 1.001  # they round after each of two passes
    assert difference.mean() < 0.25


def test_centre_is_cut_out():
    whole = Preprocessing(64)(torch.tensor(NOISE))
    cut = Preprocessing(48, resize_px=64)(torch.tensor(NOISE))
    assert torch.equal(cut, whole[:, :, 8:56, 8:56])


def test_each_channel_has_its_own_mean_and_deviation():
    tile = torch.tensor([51, 102, 204], dtype=torch.uint8).expand(1, 8, 8, 3)
    images = Preprocessing(8, mean=(0.1, 0.2, 0.3), std=(0.1, 0.4, 0.25))(tile)
    torch.testing.assert_close(images[0, :, 3, 3], torch.tensor([1.0, 0.5, 2.0]))


class Mean(nn.Module):
    """The mean colour, through something that behaves differently in training."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(3)), nn.Dropout(0.5)

    def forward(self, images):
        return self.drop(images.mean((2, 3)) * self.scale)


PLAIN = Preprocessing(32, mean=(0, 0, 0), std=(1, 1, 1))


def made_encoder():
    return Mean(), PLAIN


def made_without_preprocessing():
    return Mean()


def test_own_module():
    module = Mean()
    encoder = load_encoder(module, preprocessing=PLAIN)
    assert (encoder.name, encoder.dim, encoder.reference) == ("Mean", 3, None)
    torch.testing.assert_close(encoder.encode(NOISE), torch.tensor(NOISE.mean((1, 2)) / 255).float(), atol=2e-3, rtol=0)
    assert not module.training
    assert not module.scale.requires_grad
    with pytest.raises(OptionError, match="give preprocessing="):
        load_encoder(module)
    with pytest.raises(OptionError, match="weights cannot be given"):
        load_encoder(module, preprocessing=PLAIN, weights="here")


def test_own_function_by_name():
    encoder = load_encoder(f"python:{__name__}:made_encoder")
    assert (encoder.name, encoder.dim) == ("made_encoder", 3)
    with pytest.raises(OptionError, match="must return"):
        load_encoder(f"python:{__name__}:made_without_preprocessing")
    for wrong in (f"{__name__}:absent", "no.such.module:function", "nothing"):
        with pytest.raises(OptionError, match=r"python:package\.module:function"):
            load_encoder(f"python:{wrong}")


def test_fingerprint_tells_encoders_apart():
    def of(module, how=PLAIN):
        return load_encoder(module, preprocessing=how).fingerprint

    other = Mean()
    nn.init.constant_(other.scale, 2)
    twice = nn.Sequential(Mean(), nn.Identity())
    tellings = [of(Mean()), of(other), of(twice), of(Mean(), Preprocessing(32)), of(Mean(), Preprocessing(31))]
    assert len(set(tellings)) == 5
    assert of(Mean()) == tellings[0]


def test_wrong_tiles(lite0):
    for tiles in (NOISE[0], NOISE[..., :2], NOISE.astype(np.float32)):
        with pytest.raises(ShapeError, match=r"\(b, h, w, 3\) uint8"):
            lite0.encode(tiles)


def test_modules_that_are_no_encoders():
    with pytest.raises(ShapeError, match="one vector per tile"):
        load_encoder(nn.Identity(), preprocessing=PLAIN)
    broken = Mean()
    nn.init.constant_(broken.scale, float("inf"))
    with pytest.raises(OptionError, match="not finite"):
        load_encoder(broken, preprocessing=PLAIN).encode(NOISE)


def test_wrong_options(tmp_path):
    with pytest.raises(OptionError, match="known: 'bfloat16'"):
        load_encoder("efficientnet-lite0", precision="half")
    with pytest.raises(OptionError, match="float16"):
        load_encoder("efficientnet-lite0", precision="float16")
    with pytest.raises(OptionError, match="device 'abacus'"):
        load_encoder("efficientnet-lite0", device="abacus")
    with pytest.raises(OptionError, match="preprocessing cannot be given"):
        load_encoder("efficientnet-lite0", preprocessing=PLAIN)
    with pytest.raises(OptionError, match="'uni_v2'"):
        load_encoder("uni_v3")
    with pytest.raises(DataError, match="is no folder"):
        load_encoder(tmp_path / "absent")
    (tmp_path / "weights.pth").write_bytes(b"")
    with pytest.raises(DataError, match="does not say what network"):
        load_encoder(tmp_path / "weights.pth")
    with pytest.raises(DataError, match="read safely"):
        load_encoder("efficientnet-lite0", weights=tmp_path / "weights.pth")
    torch.save({"fc": torch.zeros(2)}, tmp_path / "weights.pth")
    with pytest.raises(DataError, match="does not hold the weights"):
        load_encoder("efficientnet-lite0", weights=tmp_path / "weights.pth")


def test_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(MissingExtraError, match=r"psamil\[slides\]"):
        load_encoder("efficientnet-lite0")


def test_register(monkeypatch):
    monkeypatch.setattr(registry, "_CARDS", dict(registry._CARDS))
    card = EncoderCard("colours", 3, PLAIN, lambda weights: Mean(), source="here", licence="MIT", mpp=2.0)
    register_encoder(card)
    assert list_encoders("col*") == [card]
    assert load_encoder("colours").mpp == 2.0


def test_table_in_the_documentation():
    lines = (Path(__file__).parents[3] / "docs" / "encoders.md").read_text().splitlines()
    for card in list_encoders():
        mpp = "any" if card.mpp is None else f"{card.mpp:g}"
        cells = [f"`{card.name}`", card.dim, card.tile_px, card.preprocessing.input_px, mpp, card.licence]
        row = f"| {' | '.join(map(str, cells))} | {'yes' if card.gated else 'no'} | {card.source} |"
        assert row in lines
