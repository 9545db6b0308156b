"""Annotation files that tests write: GeoJSON as QuPath exports it, and XML of ASAP."""

import json


def square(x, y, width, height=None):
    height = width if height is None else height
    return [[x, y], [x + width, y], [x + width, y + height], [x, y + height]]


def write_geojson(path, *areas):
    """Areas are (class or None, outline, holes...)."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[*ring, ring[0]] for ring in rings]},
            "properties": {"objectType": "annotation"} | ({"classification": {"name": kind}} if kind else {}),
        }
        for kind, *rings in areas
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def write_asap(path, *areas, type="Polygon"):
    """Areas are (group, outline)."""
    annotations = "".join(
        f'<Annotation Name="{i}" Type="{type}" PartOfGroup="{group}" Color="#F4FA58"><Coordinates>'
        + "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}" />' for k, (x, y) in enumerate(outline))
        + "</Coordinates></Annotation>"
        for i, (group, outline) in enumerate(areas)
    )
    groups = '<AnnotationGroups><Group Name="Tumor" PartOfGroup="None"><Attributes/></Group></AnnotationGroups>'
    path.write_text(
        f'<?xml version="1.0"?>\n<ASAP_Annotations><Annotations>{annotations}</Annotations>{groups}</ASAP_Annotations>'
    )
    return path
