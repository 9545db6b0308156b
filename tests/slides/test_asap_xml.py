"""XML of ASAP: groups, orders, what marks no area, and files that attack."""

import numpy as np
import pytest

from psamil.errors import DataError
from psamil.slides.asap_xml import read_asap_xml
from tests.slides.outlines import square, write_asap

BOMB = """<?xml version="1.0"?>
<!DOCTYPE bomb [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>
<ASAP_Annotations><Annotations><Annotation Name="&c;"/></Annotations></ASAP_Annotations>"""
OUTSIDE = """<?xml version="1.0"?>
<!DOCTYPE a [<!ENTITY secret SYSTEM "file:///etc/passwd">]>
<ASAP_Annotations><Annotations><Annotation Name="&secret;"/></Annotations></ASAP_Annotations>"""
REMOTE = '<?xml version="1.0"?><!DOCTYPE a SYSTEM "http://127.0.0.1:1/a.dtd"><ASAP_Annotations/>'


def test_areas_with_their_groups(tmp_path):
    path = write_asap(tmp_path / "a.xml", ("_0", square(1, 2, 3)), ("_2", square(5.5, 6, 7)), ("None", square(0, 0, 1)))
    areas = read_asap_xml(path)
    assert [area.kind for area in areas] == ["_0", "_2", ""]
    np.testing.assert_array_equal(areas[1].rings[0], square(5.5, 6, 7))


def test_points_are_in_their_order(tmp_path):
    path = write_asap(tmp_path / "a.xml", ("_0", square(1, 2, 3)))
    text = path.read_text().replace('Order="1"', 'Order="9"')
    path.write_text(text)
    np.testing.assert_array_equal(read_asap_xml(path)[0].rings[0], np.array(square(1, 2, 3))[[0, 2, 3, 1]])


@pytest.mark.parametrize(("kind", "count"), [("Spline", 1), ("Rectangle", 1), ("Dot", 0), ("PointSet", 0)])
def test_what_marks_an_area(tmp_path, kind, count):
    assert len(read_asap_xml(write_asap(tmp_path / "a.xml", ("_0", square(1, 2, 3)), type=kind))) == count
    assert read_asap_xml(write_asap(tmp_path / "b.xml", ("_0", square(1, 2, 3)[:2]), type=kind)) == []


def test_nothing_outlined(tmp_path):
    assert read_asap_xml(write_asap(tmp_path / "a.xml")) == []


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (BOMB, "declares a document type"),
        (OUTSIDE, "declares a document type"),
        (REMOTE, "declares a document type"),
        (BOMB.encode("utf-16"), "declares a document type"),
        ("<ASAP_Annotations>", "not valid XML"),
        ("", "not valid XML"),
        ('<?xml version="1.0" encoding="no such"?><a/>', "not valid XML"),
        ("<Annotations/>", "root 'Annotations', not of ASAP"),
    ],
    ids=["bomb", "file", "remote", "wide bomb", "broken", "empty", "encoding", "other"],
)
def test_files_that_cannot_be_used(tmp_path, content, cause):
    (tmp_path / "a.xml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=cause):
        read_asap_xml(tmp_path / "a.xml")


@pytest.mark.parametrize("value", ["text", "nan", "1,5", ""])
def test_coordinates_that_are_no_numbers(tmp_path, value):
    path = write_asap(tmp_path / "a.xml", ("_0", [[value, 1], [2, 3], [4, 5]]))
    with pytest.raises(DataError, match="no numbers"):
        read_asap_xml(path)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_asap_xml(tmp_path / "a.xml")


def test_numbers_have_a_decimal_point(tmp_path):
    path = write_asap(tmp_path / "a.xml", ("_0", square(1.5, 2, 3)))
    path.write_text(path.read_text().replace('Order="1"', 'Order="1.0"'))
    np.testing.assert_array_equal(read_asap_xml(path)[0].rings[0], square(1.5, 2, 3))
    path.write_text(path.read_text().replace('"1.5"', '"1,5"'))
    with pytest.raises(DataError, match=r"no numbers: .*1,5.*decimal point"):
        read_asap_xml(path)
