import pytest

from psamil.errors import DataError
from psamil.files import read_json, write_json
from psamil.serve.study import Study, opaque_id, pictures_below
from tests.serve.cases import lattice, write_features


def test_what_belongs_together(study):
    opened = Study.open([study.psa, study.abmil], study.features, study.slides, study.tile_labels)
    slides = {slide.name: slide for slide in opened.slides.values()}
    assert list(slides) == [f"s{i:02d}" for i in range(12)]
    assert [name for name, slide in slides.items() if slide.picture is not None] == ["s00", "s01"]
    assert [name for name, slide in slides.items() if not slide.has_labels] == ["s11"]
    assert [run.name for run in opened.runs.values()] == ["psa", "abmil"]
    assert opened.slides[slides["s03"].id] is slides["s03"]


def test_features_that_the_run_remembers(study):
    assert len(Study.open([study.psa]).slides) == 12


@pytest.mark.parametrize(
    ("recorded", "said"), [(None, "does not say where"), ("/nowhere/at/all", "is not there any more")]
)
def test_features_that_it_does_not(study, tmp_path, recorded, said):
    about = read_json(study.psa / "run.json")
    write_json(tmp_path / "run.json", {**about, "features": recorded})
    with pytest.raises(DataError, match=rf"{said}.*--features"):
        Study.open([tmp_path])


def test_runs_of_other_tiles(study, tmp_path):
    about = read_json(study.psa / "run.json")
    write_json(tmp_path / "run.json", {**about, "reading": {**about["reading"], "non_finite": "drop"}})
    with pytest.raises(DataError, match="one at a time"):
        Study.open([study.psa, tmp_path])


def test_features_of_others(study, tmp_path):
    write_features(tmp_path, "stranger", lattice((0, 0), seed=0), seed=0)
    with pytest.raises(DataError, match="stranger"):
        Study.open([study.psa], tmp_path)


def test_slides_of_others(study, tmp_path):
    (tmp_path / "stranger.tif").write_bytes(b"")
    with pytest.raises(DataError, match="stranger"):
        Study.open([study.psa], slides=tmp_path)


def test_ids_tell_nothing_and_depend_on_nothing_else():
    assert opaque_id("slide") == opaque_id("slide")
    assert opaque_id("slide") != opaque_id("slide ")
    assert len(opaque_id("../../etc/passwd")) == 16
    assert opaque_id("../../etc/passwd").isalnum()


def test_links_out_of_the_folder_are_no_slides_of_it(tmp_path):
    inside, sibling = tmp_path / "slides", tmp_path / "slides-of-others"
    for folder in (inside / "below", sibling):
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.tif").write_bytes(b"")
    (inside / "kept.tif").symlink_to(inside / "below" / "below.tif")
    (inside / "out.tif").symlink_to(sibling / "slides-of-others.tif")  # whose path begins like that of the folder
    pictures, outside = pictures_below(inside)
    assert set(pictures) == {"below", "kept"}
    assert outside == 1


def test_a_folder_that_is_itself_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "slide.tif").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert set(pictures_below(tmp_path / "link")[0]) == {"slide"}
