"""Damaged and hostile h5 files read right or are named; they never end the process, hang, or give a short bag."""

import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest

from psamil.errors import DataError
from psamil.readers import find_bags, open_bag
from psamil.readers.hdf5 import CheckedH5
from tests.readers.layouts import (
    FEATURES,
    STAMP_ATTRIBUTES,
    N,
    corners,
    write_clam,
    write_clam_patches,
    write_h5,
    write_stamp,
    write_trident,
)


def write_trident_with_patches(folder):
    write_trident(folder, "flipped").unlink()
    return write_trident(folder)


def write_clam_with_patches(folder):
    write_clam_patches(folder, "flipped")
    write_clam_patches(folder)
    return write_clam(folder, kinds=("h5",))


WRITERS = {
    "trident": write_trident_with_patches,
    "clam": write_clam_with_patches,
    "stamp": write_stamp,
    "compressed": lambda folder: write_h5(
        folder / "slide.h5",
        {"features": FEATURES, "coords": corners(512)},
        chunks=lambda a: (8, *a.shape[1:]),
        compression=lambda a: "gzip",
    ),
}


@pytest.fixture(params=WRITERS)
def healthy(request, tmp_path):
    return WRITERS[request.param](tmp_path)


def read_or_named(path):
    """The bag, or None if the file was refused with its name."""
    try:
        return open_bag(path)
    except DataError as error:
        return None if error.path == str(path) and error.cause and error.remedy else pytest.fail(str(error))


def payload(path):
    """Which bytes of a file are numbers of the arrays: nothing tells whether they are the right ones."""
    is_payload = np.zeros(path.stat().st_size, bool)
    with h5py.File(path) as file:
        for dataset in file.values():
            if dataset.chunks:
                blocks = []
                dataset.id.chunk_iter(lambda chunk, blocks=blocks: blocks.append((chunk.byte_offset, chunk.size)))
            else:
                blocks = [(dataset.id.get_offset(), dataset.id.get_storage_size())]
            for start, size in blocks:
                is_payload[start : start + size] = True
    return is_payload


def test_every_truncation_is_named(tmp_path):
    features = np.tile(FEATURES, (1, 64))
    for path in (
        write_trident(tmp_path / "trident", features=features, patches=False),
        write_stamp(tmp_path / "stamp", arrays={"feats": features, "coords": corners(256, "f4")}),
    ):
        content = path.read_bytes()
        assert len(content) > 50 * 4096
        for size in range(0, len(content), 4096):
            path.write_bytes(content[:size])
            assert read_or_named(path) is None
        found = find_bags(path)
        assert found.bags == ()
        assert "damaged, incomplete" in found.set_aside[0].reason


def test_flipped_bytes(healthy):
    """200 anywhere and 200 in the structure of the file, where they do harm."""
    good, content, is_payload = open_bag(healthy), healthy.read_bytes(), payload(healthy)
    rng = np.random.default_rng(0)
    places = [*rng.integers(len(content), size=200), *rng.choice(np.flatnonzero(~is_payload), 200)]
    flipped = healthy.with_name("flipped.h5")
    named = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= rng.integers(1, 256)
        flipped.write_bytes(damaged)
        bag = read_or_named(flipped)
        named += bag is None
        if bag is not None:
            assert bag.features.shape == good.features.shape
            assert bag.step.unit == good.step.unit
            assert is_payload[place] or ((bag.features == good.features).all() and (bag.xy == good.xy).all()), place
    assert named > 10


@pytest.mark.parametrize("name", ["features", "coords"])
@pytest.mark.parametrize("format", ["trident", "clam", "stamp"])
def test_wrong_address(tmp_path, format, name):
    """Every other value of the lower bytes of the address of an array, or of its first and last chunk."""
    path = WRITERS[format](tmp_path)
    good, content, is_payload = open_bag(path), path.read_bytes(), payload(path)
    with h5py.File(path) as file:
        dataset = file["feats" if format == "stamp" and name == "features" else name]
        ends = [0, dataset.id.get_num_chunks() - 1] if dataset.chunks else []
        starts = [dataset.id.get_chunk_info(i).byte_offset for i in ends] or [dataset.id.get_offset()]
    flipped = path.with_name("flipped.h5")
    for start in starts:
        place = next(at for at in range(len(content)) if content[at : at + 8] == start.to_bytes(8, "little"))
        assert not is_payload[place]
        for byte, flip in [(0, 8), (0, 64), (1, 1), *((1, flip) for flip in range(2, 256, 9)), (2, 1)]:
            damaged = bytearray(content)
            damaged[place + byte] ^= flip
            flipped.write_bytes(damaged)
            bag = read_or_named(flipped)
            assert bag is None or ((bag.features == good.features).all() and (bag.xy == good.xy).all()), (byte, flip)


def test_array_moved_into_a_gap(tmp_path):
    """A little forwards, where nothing is: what it leaves behind tells."""
    path = write_h5(tmp_path / "slide.h5", {"coords": corners(512), "features": FEATURES})
    content = path.read_bytes()
    with h5py.File(path) as file:
        start = file["features"].id.get_offset()
    damaged = content.replace(start.to_bytes(8, "little"), (start + 64).to_bytes(8, "little")) + bytes(64)
    end = len(content).to_bytes(8, "little")
    path.write_bytes(damaged.replace(end, (len(content) + 64).to_bytes(8, "little")))
    with h5py.File(path) as file:
        assert file["features"].shape == FEATURES.shape
    with pytest.raises(DataError, match=r"something at byte \d+ that belongs to nothing"):
        open_bag(path)


def test_two_arrays_in_one_place(tmp_path):
    path = write_h5(tmp_path / "slide.h5", {"features": FEATURES})
    with h5py.File(path, "a") as file:
        file["coords"] = file["features"]
    refused(path, "overlap")


def test_whole_files_with_a_history(tmp_path):
    """Texts that were replaced, rows that were appended, other arrays, groups."""
    path = tmp_path / "slide.h5"
    for rows in range(6, N + 1, 6):
        with h5py.File(path, "a") as file:
            for name, values in (("features", FEATURES), ("coords", corners(512))):
                shape = (None, *values.shape[1:])
                dataset = file.require_dataset(name, (0, shape[1]), values.dtype, chunks=(6, shape[1]), maxshape=shape)
                dataset.resize(rows, axis=0)
                dataset[-6:] = values[rows - 6 : rows]
                dataset.attrs["note"] = "x" * 300 * rows
    assert (open_bag(path).features.numpy() == FEATURES).all()
    with h5py.File(path, "a") as file:
        file["names"], file["label"] = ["a", "b"], "c"
        file.create_dataset("later", (10, 10), "f4", chunks=(1, 10))
        file.create_dataset("packed", data=FEATURES, compression="gzip")
    assert (open_bag(path).features.numpy() == FEATURES).all()
    with h5py.File(path, "a") as file:
        file["group/values"] = np.ones(100)
    assert (open_bag(path).features.numpy() == FEATURES).all()


def test_deleted_array_asks_for_a_new_file(tmp_path):
    path = write_h5(tmp_path / "slide.h5", {"features": FEATURES.astype("f8"), "coords": corners(512)})
    with h5py.File(path, "a") as file:
        del file["features"]
        file["features"] = FEATURES
    refused(path, "if an array was deleted on purpose, copy the others")


def test_text_that_cannot_be_read_is_not_left_out(tmp_path):
    """HDF5 keeps many attributes of its newer format in a way that is not followed; one of them may be the unit."""
    path = tmp_path / "slide.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["feats"], file["coords"] = FEATURES, corners(256, "f4")
        file.attrs.update(STAMP_ATTRIBUTES | {f"more{i}": i for i in range(5)})
    with pytest.raises(DataError, match=r"attributes .*unit.* cannot be read"):
        open_bag(path)


def test_index_that_hdf5_no_longer_finds_chunks_by(tmp_path):
    """Each chunk is listed with a corner of one axis more than the array has, and HDF5 searches for that, too."""
    path = WRITERS["trident"](tmp_path)
    content, good = path.read_bytes(), open_bag(path)
    with h5py.File(path) as file:
        place = file["features"].id.get_chunk_info(10).byte_offset
    address = content.index(place.to_bytes(8, "little"))
    damaged = bytearray(content)
    damaged[address - 1] ^= 1
    path.write_bytes(damaged)
    with h5py.File(path) as file:
        assert (file["features"][10] == 0).all()
    assert (open_bag(path).features == good.features).all()


@pytest.mark.parametrize("change", [-1, 1, 32, 256])
@pytest.mark.parametrize("axis", [0, 1])
def test_dimension_that_does_not_fit_its_bytes(healthy, axis, change):
    """Both of the shape and, for arrays that can grow, of the largest shape."""
    shape = FEATURES.shape
    content = healthy.read_bytes()
    wrong = [*shape]
    wrong[axis] += change
    old, new = (b"".join(size.to_bytes(8, "little") for size in sizes) for sizes in (shape, wrong))
    assert content.count(old) >= 1
    healthy.write_bytes(content.replace(old, new))
    with pytest.raises(DataError):
        open_bag(healthy)


def test_garbage_and_empty_files(tmp_path):
    for name, content in {"empty.h5": b"", "text.h5": b"features", "zeros.h5": bytes(10_000)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="not HDF5"):
            open_bag(tmp_path / name)
    assert len(find_bags(tmp_path).set_aside) == 3


@pytest.fixture
def secret(tmp_path):
    """A file outside of the folder of features."""
    return write_h5(tmp_path / "secret.h5", {"features": FEATURES, "coords": corners(512)})


def test_files_with_a_foreign_beginning(tmp_path):
    with h5py.File(tmp_path / "slide.h5", "w", userblock_size=512) as file:
        file["features"], file["coords"] = FEATURES, corners(512)
    refused(tmp_path / "slide.h5", "begins with a block that is not HDF5")


def refused(path, cause):
    with pytest.raises(DataError, match=cause):
        open_bag(path)
    with pytest.raises(DataError, match=cause):
        open_bag(path, format="clam")


@pytest.mark.parametrize("name", ["features", "coords"])
def test_external_link(tmp_path, secret, name):
    path = write_h5(tmp_path / "a" / "slide.h5", {"features": FEATURES, "coords": corners(512)})
    with h5py.File(path, "a") as file:
        del file[name]
        file[name] = h5py.ExternalLink(str(secret), "/features")
    refused(path, "is a link")


def test_soft_link_out_of_the_file(tmp_path, secret):
    path = write_h5(tmp_path / "a" / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        file["door"] = h5py.ExternalLink(str(secret), "/")
        file["features"] = h5py.SoftLink("/door/features")
    refused(path, "is a link")


def test_virtual_dataset(tmp_path, secret):
    path = write_h5(tmp_path / "a" / "slide.h5", {"coords": corners(512)})
    layout = h5py.VirtualLayout(FEATURES.shape, FEATURES.dtype)
    layout[:] = h5py.VirtualSource(secret, "features", FEATURES.shape)
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("features", layout)
    refused(path, "stored outside")


def test_external_storage(tmp_path):
    (tmp_path / "passwords").write_bytes(FEATURES.tobytes())
    path = write_h5(tmp_path / "a" / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        where = [(str(tmp_path / "passwords"), 0, FEATURES.nbytes)]
        file.create_dataset("features", FEATURES.shape, FEATURES.dtype, external=where)
    refused(path, "stored outside")


@pytest.mark.parametrize(
    "kind", [h5py.string_dtype(), h5py.vlen_dtype(np.float32), np.dtype([("a", "f4")]), ">f4", "S8"]
)
def test_datasets_of_other_things_than_numbers(tmp_path, kind):
    path = write_h5(tmp_path / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        file.create_dataset("features", (N, 16), kind)
    refused(path, "plain little-endian numbers")


def test_group_instead_of_an_array(tmp_path):
    path = write_h5(tmp_path / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        file.create_group("features")
    refused(path, "is a group")


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 1 << 20)}, {"chunks": (1, 1 << 20), "compression": "gzip"}])
def test_announced_sizes_are_not_allocated(tmp_path, storage):
    """A petabyte that was never written."""
    path = write_h5(tmp_path / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        file.create_dataset("features", (1 << 28, 1 << 20), "f4", **storage)
    refused(path, "needs")


def test_compression_bomb(tmp_path):
    path = write_h5(tmp_path / "slide.h5", {"coords": corners(512)})
    with h5py.File(path, "a") as file:
        file.create_dataset(
            "features", data=np.zeros((1 << 16, 1 << 11), "f4"), chunks=(1 << 13, 1 << 11), compression=9
        )
    refused(path, "more bytes than the file can hold")


def test_file_that_another_process_writes(tmp_path):
    path = write_stamp(tmp_path)
    writer = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", writer, path], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(DataError, match="being written"):
            open_bag(path)
        process.stdin.close()
    assert open_bag(path).n == N


@pytest.mark.parametrize("chunks", [True, (1, 16), (32, 16), (7, 5), (64, 16)], ids=str)
@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_every_storage_is_read_right(tmp_path, chunks, compression, libver):
    with h5py.File(tmp_path / "slide.h5", "w", libver=libver) as file:
        file.create_dataset("features", data=FEATURES, maxshape=(None, 16), chunks=chunks, compression=compression)
        file.create_dataset("coords", data=corners(512), maxshape=(None, 2))
    with CheckedH5(tmp_path / "slide.h5") as file:
        np.testing.assert_array_equal(file.read("features"), FEATURES)
        np.testing.assert_array_equal(file.read("coords"), corners(512))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_attributes(tmp_path, libver):
    about = {
        "a": 3,
        "b": 2.5,
        "c": (1.5, 2.5),
        "text": "µm, ünï",
        "bytes": np.bytes_("abc"),
        "none": "None",
        "empty": "",
    }
    with h5py.File(tmp_path / "slide.h5", "w", libver=libver) as file:
        file.create_dataset("coords", data=[0])
        file["coords"].attrs.update(about)
        file.attrs["unit"] = "um"
        file["coords"].attrs["ref"] = file.ref
    with CheckedH5(tmp_path / "slide.h5") as file:
        expected = about | {"c": [1.5, 2.5], "bytes": "abc"}
        del expected["none"]
        assert file.attributes("coords") == expected
        assert file.attributes() == {"unit": "um"}


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_memory_is_that_of_the_features(tmp_path):
    """In a fresh process, beyond what it takes to open a small file of the same kind."""
    n, dim = 60_000, 1024
    xy = np.stack(np.divmod(np.arange(n), 300), 1) * 512
    large = write_trident(tmp_path, "large", features=np.ones((n, dim), np.float16), coords=xy, patches=False)
    small = write_trident(tmp_path, "small", features=np.ones((1000, dim), np.float16), coords=xy[:1000], patches=False)
    measure = textwrap.dedent(
        """
        import resource, sys
        from psamil.readers import open_bag
        open_bag(sys.argv[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bag = open_bag(sys.argv[2])
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / bag.features.nbytes)
        """
    )
    run = subprocess.run([sys.executable, "-c", measure, small, large], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.3
