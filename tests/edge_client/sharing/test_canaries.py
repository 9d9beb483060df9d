"""What is planted in pictures, their names and their table stays here: 100 files through `contribute` and `sync`.

Source: docs/security.md, attack list 8 and 9, check 36; DICOM PS3.15 (what identifies a person).
"""

import base64
import logging

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.edge_client.scoring.test_dicom import dicom

from edgefl_protocol import Payload

MARK = "CANARY4711CANARY"  # each place has its own: MARK-artist-7, MARK-name-7 …
GPS, FORMATS = 0x8825, "jpeg,png,tiff,dicom"
PLACES = (  # those that stand in a file as they are; `ztext` is compressed, a name is outside
    "description", "artist", "maker", "serial", "gps", "date", "icc", "xmp", "comment", "text", "id", "institution",
    "physician", "device", "dicomcomment",
)  # fmt: skip


def word(place: str, number: int) -> str:
    return f"{MARK}-{place}-{number}"


def tagged(number: int) -> Image.Exif:
    """EXIF with a description, an artist, a maker's note, a serial number and a place on Earth."""
    exif = Image.Exif()
    exif[0x010E], exif[0x013B] = word("description", number), word("artist", number)
    exif.get_ifd(0x8769)[0x927C] = word("maker", number).encode()
    exif.get_ifd(0x8769)[0xA431] = word("serial", number)
    exif.get_ifd(GPS)[0x001B] = word("gps", number).encode()
    exif.get_ifd(GPS)[0x001D] = word("date", number)
    return exif


def file_of(lab, number: int) -> tuple[str, bytes]:
    """One of 100 pictures, and the name it goes by."""
    pixels = lab.photo(50, 40, (180 + number % 20, 120, 90))
    exif, icc = tagged(number), word("icc", number).encode() * 20
    xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/">{word("xmp", number)}</x:xmpmeta>'.encode()
    name = word("name", number)
    kind = number % 4
    if kind == 0:
        comment = word("comment", number).encode()
        data = lab.encoded(pixels, "JPEG", exif=exif, icc_profile=icc, xmp=xmp, comment=comment)
        return f"{name}.jpg", data
    if kind == 1:
        info = PngInfo()
        info.add_text("Patient", word("text", number))
        info.add_text("Report", word("ztext", number), zip=True)
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
        return f"{name}.png", lab.encoded(pixels, "PNG", exif=exif, icc_profile=icc, pnginfo=info)
    if kind == 2:
        return f"{name}.tif", lab.encoded(pixels, "TIFF", exif=exif, icc_profile=icc)
    tags = {
        "PatientID": word("id", number), "PatientBirthDate": "19700101", "InstitutionName": word("institution", number),
        "ReferringPhysicianName": word("physician", number), "DeviceSerialNumber": word("device", number),
        "AccessionNumber": word("acc", number)[:16], "PatientComments": word("dicomcomment", number),
    }  # fmt: skip
    return f"{name}.dcm", dicom(pixels, "RGB", **tags)


def forms(text: str) -> set[bytes]:
    """The ways in which a text comes to stand in bytes, whatever lies before it."""
    plain = text.encode()
    coded = {base64.b64encode(bytes(lead) + plain)[4:-4] for lead in (0, 1, 2)}
    return {plain, plain.lower(), plain.hex().encode(), text.encode("utf-16-le"), text.encode("utf-16-be"), *coded}


@pytest.fixture
def heard(live, monkeypatch):
    """All that leaves the device: every request as sent, and what it holds when it is opened."""
    out = []
    send, judge = live.send, live._judge
    monkeypatch.setattr(
        live, "send", lambda request: out.append(request.body + request.query.encode()) or send(request)
    )
    monkeypatch.setattr(live, "_judge", lambda cty, opened: out.append(opened.payload) or judge(cty, opened))
    return out


def test_nothing_planted_in_100_files_leaves(run, device, live, lab, heard, caplog):
    """docs/security.md check 36: 100 files of 4 kinds, 21 kinds of canary: 0 bytes in any payload, request, log or file
    of the device; the same search finds them in the pictures.
    """
    caplog.set_level(logging.DEBUG)
    folder = device / word("folder", 0)
    folder.mkdir()
    rows = [f"image,label,{MARK}-column"]
    planted = b""
    for number in range(100):
        name, data = file_of(lab, number)
        (folder / name).write_bytes(data)
        planted += data
        rows.append(f"{name},{lab.CLASSES[number % 3]},{word('patient', number)}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    caplog.clear()  # Pillow tells of the tags that it wrote
    assert run("pull")[0] == 0
    code, out, err = run("contribute", "--labels", folder / "labels.csv", "--formats", FORMATS, "--json")
    assert code == 0, err
    said = err  # its standard output tells the owner which picture made which map
    for command in (("sync",), ("status",), ("rotate",), ("sync", "--json")):
        code, out, err = run(*command)
        assert code == 0
        said += out + err
    ((_, _, content),) = live.effects
    assert sum(len(maps) for maps in Payload.from_bytes(content).arrays.values()) == 15  # five of each class
    kept = b"".join(path.read_bytes() for path in run.home.rglob("*") if path.is_file())
    for form in forms(MARK):
        assert form not in b"".join(heard)
        assert form not in kept
        assert form.decode("latin-1") not in caplog.text + said
    for place in PLACES:
        assert f"{MARK}-{place}-".encode() in planted, place  # the pictures do hold them: the test can fail


def test_an_error_names_the_file_to_its_owner_alone(run, device, live, heard):
    """A picture that cannot be read is named on the owner's screen, and nothing of it leaves."""
    (device / f"{MARK}-broken.png").write_bytes(b"no picture")
    (device / "labels.csv").write_text(f"image,label\n{MARK}-broken.png,MEL\n")
    assert run("pull")[0] == 0
    code, out, err = run("contribute", "--labels", device / "labels.csv")
    assert (code, out) == (1, "") and f"{MARK}-broken.png" in err
    assert run("sync")[0] == 0
    assert MARK.encode() not in b"".join(heard) and live.effects == []
