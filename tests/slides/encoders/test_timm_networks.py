"""Networks that timm builds: foundation models by name, local folders, any network of timm with a file of weights."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from psamil.errors import DataError, MissingExtraError, OptionError, PsamilError
from psamil.slides.encoders import foundation, list_encoders, load_encoder, vision_towers
from psamil.slides.encoders.dinov2_names import dinov2_network

from .made_dinov2 import FEATURES, KINDS, made_images, made_weights

TILES = torch.arange(2 * 48 * 48 * 3).remainder(251).to(torch.uint8).reshape(2, 48, 48, 3)

# millions of parameters of these architectures; their authors tell rounded numbers (303M, 681M, 1.1B, 632M, ...)
MILLIONS = {
    "lunit-vits8": 21.7,
    "lunit-vits16": 21.7,
    "uni_v1": 303.4,
    "uni_v2": 681.4,
    "gigapath": 1134.9,
    "virchow2": 631.2,
    "virchow2-cls": 631.2,
    "hoptimus0": 1134.8,
    "ctranspath": 27.5,
    "conch_v15": 306.7,  # ViT-L/16 at 448 px and the pooling
}


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_size_and_width_of_foundation_models(timm, monkeypatch, name):
    """Built without weights: torch's device "meta" knows shapes only."""
    monkeypatch.setattr(foundation, "read_weights", lambda path: {})
    for module in (foundation, vision_towers):
        monkeypatch.setattr(module, "fill", lambda network, weights: network)
    (card,) = list_encoders(name)
    network = card.build(Path("absent")).eval()
    tensors = list(network.parameters())
    px = card.preprocessing.input_px
    features = network(torch.zeros(1, 3, px, px, device=tensors[0].device))
    assert features.shape == (1, card.dim)
    assert sum(tensor.numel() for tensor in tensors) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)


def test_every_foundation_model_is_covered():
    assert {card.name for card in list_encoders()} - set(MILLIONS) == {
        "efficientnet-lite0",
        "hoptimus1",  # the network of hoptimus0
        "phikon_v2",
        "hibou_b",
        "hibou_l",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_dinov2_as_transformers_computes_it(timm, kind):
    expected = torch.tensor(json.loads(FEATURES.read_text())[kind])
    features = dinov2_network(made_weights(kind)).eval()(made_images())
    assert features.shape == (2, 128)
    torch.testing.assert_close(features[:, :16], expected, atol=2e-5, rtol=2e-5)


def test_foundation_model_from_a_file(timm, tmp_path):
    """CTransPath is the smallest; its published file has names of an older Swin and buffers that timm dropped."""
    network = timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=0, embed_layer=vision_towers.ConvolutionStem
    ).eval()
    old = {}
    for name, tensor in network.state_dict().items():
        moved = re.sub(r"layers\.(\d)\.downsample", lambda found: f"layers.{int(found[1]) - 1}.downsample", name)
        old[moved] = tensor.clone()
    old["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    torch.save({"model": old}, tmp_path / "ctranspath.pth")
    encoder = load_encoder("ctranspath", weights=tmp_path / "ctranspath.pth")
    assert (encoder.name, encoder.dim, encoder.mpp, encoder.tile_px) == ("ctranspath", 768, 1.0, 256)
    images = encoder.preprocessing(TILES)
    torch.testing.assert_close(encoder.encode(TILES), network(images).detach(), atol=1e-5, rtol=1e-5)


def test_weights_of_another_network(timm, tmp_path):
    save_file({"cls_token": torch.zeros(1, 1, 8)}, tmp_path / "model.safetensors")
    for name in ("lunit-vits16", "phikon_v2", "conch_v15"):
        with pytest.raises(DataError) as error:
            load_encoder(name, weights=tmp_path / "model.safetensors")
        assert f"does not hold the weights of {name}" in one_line(error)


def test_pickled_code_is_not_run(timm, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was run",)

    torch.save({"cls_token": Evil()}, tmp_path / "model.bin")
    with pytest.raises(DataError) as error:
        load_encoder("uni_v1", weights=tmp_path / "model.bin")
    assert "read safely" in one_line(error)
    assert not (tmp_path / "was run").exists()


def test_missing_model_of_the_hub_is_one_line(timm, monkeypatch, caplog):
    import huggingface_hub
    from huggingface_hub.utils import logging

    def offline(repository, file, local_files_only=False):
        if not local_files_only:
            logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("[Errno -3] Temporary failure in name resolution\nTraceback ...")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(DataError) as error:
        load_encoder("uni_v2")
    text = one_line(error)
    for part in (
        "huggingface.co/MahmoodLab/UNI2-h",
        "pytorch_model.bin",
        "hf auth login",
        "CC-BY-NC-ND-4.0",
        "weights",
    ):
        assert part in text
    with pytest.raises(DataError) as error:
        load_encoder("timm:resnet18.a1_in1k")
    assert "hf download timm/resnet18.a1_in1k model.safetensors" in one_line(error)
    assert not caplog.records


def test_files_of_the_hub_that_were_downloaded_are_used_offline(timm, tmp_path, monkeypatch):
    import huggingface_hub

    folder = small_folder(timm, tmp_path)

    def cached(repository, file, local_files_only=False):
        assert (repository, local_files_only) == ("timm/test_vit.r160_in1k", True)
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    encoder = load_encoder("timm:test_vit.r160_in1k")
    torch.testing.assert_close(encoder.encode(TILES), load_encoder(folder).encode(TILES))


def small_folder(timm, tmp_path):
    """As timm writes it and as it lies on the hub, for the smallest network timm has."""
    torch.manual_seed(3)
    network = timm.create_model("test_vit", num_classes=0)
    folder = tmp_path / "small vit"
    timm.models.save_for_hf(network, str(folder), safe_serialization=True)
    return folder


def test_local_folder(timm, tmp_path, monkeypatch):
    folder = small_folder(timm, tmp_path)
    monkeypatch.chdir(tmp_path)
    encoder = load_encoder(folder.name)
    assert encoder.reference == str(folder)  # wherever it is loaded again
    config = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert (encoder.name, encoder.dim, encoder.input_px) == ("small vit", 64, config["input_size"][-1])
    assert list(encoder.preprocessing.mean) == config["mean"]
    torch.manual_seed(3)
    network = timm.create_model("test_vit", num_classes=0).eval()
    torch.testing.assert_close(encoder.encode(TILES), network(encoder.preprocessing(TILES)).detach())
    same = load_encoder("timm:test_vit", weights=folder / "model.safetensors")
    assert same.fingerprint == encoder.fingerprint


def test_local_folder_with_broken_files(timm, tmp_path):
    folder = small_folder(timm, tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError) as error:
        load_encoder(folder)
    assert "cannot be loaded" in one_line(error)
    (folder / "config.json").write_text("{}")
    with pytest.raises(DataError, match="without 'architecture'"):
        load_encoder(folder)


def test_unknown_network_of_timm(timm):
    with pytest.raises(OptionError, match=r"known: '.*resnet"):
        load_encoder("timm:resnet1234")
    with pytest.raises(OptionError, match="no weights"):
        load_encoder("timm:cspresnet50d")


def test_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for name in ("uni_v1", "timm:resnet18"):
        with pytest.raises(MissingExtraError, match=re.escape("psamil[encoders]")):
            load_encoder(name)


def test_torchvision_of_another_torch(monkeypatch):
    """It raises RuntimeError while it is imported, which users should not have to read."""

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(PsamilError) as error:
        load_encoder("uni_v1")
    assert f"install the torchvision that belongs to torch {torch.__version__}" in one_line(error)


def test_class_token_beside_mean(timm):
    network = timm.create_model("test_vit", num_classes=0, reg_tokens=4).eval()
    images = torch.randn(2, 3, 160, 160)
    tokens = network.forward_features(images)
    expected = torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], dim=1)
    torch.testing.assert_close(vision_towers.ClassAndMean(network)(images), expected)


def test_attention_pooling_against_multihead_attention():
    torch.manual_seed(0)
    pooling = vision_towers.AttentionPooling(32, 48)
    nn.init.normal_(pooling.query)
    tokens = torch.randn(3, 10, 48)
    reference = nn.MultiheadAttention(32, 8, bias=False, batch_first=True)
    key, value = pooling.to_kv.weight.chunk(2)
    context = pooling.ln_k(tokens)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.eye(32).repeat(3, 1))
        reference.out_proj.weight.copy_(pooling.to_out.weight)
    query = pooling.to_q(pooling.ln_q(pooling.query)).expand(3, 1, 32)
    expected, _ = reference(query, context @ key.T, context @ value.T)
    torch.testing.assert_close(pooling(tokens), expected[:, 0])
