"""DICOM on the device: the right pixels, each way to be wrong, and nothing of its tags. Source: DICOM PS3.3, PS3.5."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from tests.edge_client.scoring.picture_files import SHAPE, code_of, saved, scene

from edgefl_client.scoring.decoders import decode_safely
from edgefl_client.scoring.pictures import FORMATS, PictureReader
from edgefl_protocol.errors import ImageError

DICOM_EXTRA = "pydicom not installed: needs edgefl-derm[dicom]"


@pytest.fixture(scope="module")
def reader():
    with PictureReader(FORMATS) as one:
        yield one


def dicom(pixels: np.ndarray, kind: str, **tags: object) -> bytes:
    pydicom = pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    from pydicom.dataset import FileDataset, FileMetaDataset

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = tags.pop("syntax", "1.2.840.10008.1.2.1")
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.4"  # VL Photographic Image
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    file = FileDataset(None, {}, file_meta=meta, preamble=bytes(128))
    file.PatientName = "CANARY^4711"
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    file.PhotometricInterpretation, file.PixelRepresentation = kind, 0
    file.BitsAllocated = file.BitsStored = 8 * pixels.dtype.itemsize
    file.HighBit = file.BitsStored - 1
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    out = io.BytesIO()
    pydicom.dcmwrite(out, file, enforce_file_format=True)
    return out.getvalue()


def test_dicom_pixels(reader):
    """DICOM PS3.3, C.7.6.3.1.2: RGB as it is, MONOCHROME1 inverted, 16 bits shifted, planes apart put together."""
    np.testing.assert_array_equal(reader.decode(dicom(scene(), "RGB")).pixels, scene())
    grey = scene()[:, :, 0]
    np.testing.assert_array_equal(reader.decode(dicom(grey, "MONOCHROME2")).pixels[:, :, 0], grey)
    np.testing.assert_array_equal(reader.decode(dicom(grey, "MONOCHROME1")).pixels[:, :, 2], 255 - grey)
    twelve = (grey.astype(np.uint16) << 4) + 5
    got = reader.decode(dicom(twelve, "MONOCHROME2", BitsStored=12, HighBit=11)).pixels
    np.testing.assert_array_equal(got[:, :, 1], grey)
    apart = dicom(scene(), "RGB", PlanarConfiguration=1, PixelData=scene().transpose(2, 0, 1).tobytes())
    np.testing.assert_array_equal(reader.decode(apart).pixels, scene())
    ybr = np.asarray(Image.fromarray(scene()).convert("YCbCr"))
    assert np.abs(reader.decode(dicom(ybr, "YBR_FULL")).pixels.astype(int) - scene()).max() <= 3


def test_dicom_with_jpeg_inside(reader):
    pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    from pydicom.encaps import encapsulate

    inside = saved(scene(), "JPEG", quality=95)
    data = dicom(
        scene(),
        "YBR_FULL_422",
        syntax="1.2.840.10008.1.2.4.50",
        PixelData=encapsulate([inside + b"\x00" * (len(inside) % 2)]),
    )
    np.testing.assert_array_equal(reader.decode(data).pixels, np.asarray(Image.open(io.BytesIO(inside)).convert("RGB")))


def test_dicom_with_an_inverted_jpeg_inside(reader):
    """DICOM PS3.3 C.7.6.3.1.2: MONOCHROME1 shows the smallest value as white, compressed or not."""
    pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    from pydicom.encaps import encapsulate

    grey = scene()[:, :, 0]
    inside = saved(grey, "JPEG", quality=95)
    frame = encapsulate([inside + b"\x00" * (len(inside) % 2)])
    data = dicom(grey, "MONOCHROME1", syntax="1.2.840.10008.1.2.4.50", PixelData=frame)
    wanted = 255 - np.asarray(Image.open(io.BytesIO(inside)))
    np.testing.assert_array_equal(reader.decode(data).pixels[:, :, 0], wanted)


def test_a_jpeg_inside_whose_colours_nobody_tells_is_refused(reader):
    """DICOM PS3.5 8.2.1 lets RGB stand in a JPEG without a marker, which every decoder would take for YCbCr."""
    pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    from pydicom.encaps import encapsulate

    told = saved(scene(), "JPEG", quality=95, keep_rgb=True)  # with Adobe's marker: not transformed
    marker = told.index(b"\xff\xee")
    untold = told[:marker] + told[marker + 2 + struct.unpack_from(">H", told, marker + 2)[0] :]
    assert b"Adobe" in told and b"Adobe" not in untold and b"JFIF" not in untold
    for kind, inside, good in (("RGB", told, True), ("RGB", untold, False), ("PALETTE COLOR", told, False)):
        frame = encapsulate([inside + b"\x00" * (len(inside) % 2)])
        data = dicom(scene(), kind, syntax="1.2.840.10008.1.2.4.50", PixelData=frame)
        if good:
            assert np.abs(reader.decode(data).pixels.astype(int) - scene()).mean() < 4
        else:
            assert code_of(reader, data) == "unsupported_format"


def as_shown(stored: float, center: float, width: float, slope: float = 1, intercept: float = 0) -> float:
    """DICOM PS3.3, C.11.2.1.2.1, as it stands there, from 0 to 255, of what C.11.1 makes of a stored value."""
    x = stored * slope + intercept
    if x <= center - 0.5 - (width - 1) / 2:
        return 0.0
    if x > center - 0.5 + (width - 1) / 2:
        return 255.0
    return ((x - (center - 0.5)) / (width - 1) + 0.5) * 255


@pytest.mark.parametrize(
    ("tags", "window"),
    [
        ({"WindowCenter": 500, "WindowWidth": 1000}, (500, 1000)),
        ({"WindowCenter": [2400, 40], "WindowWidth": [1600, 400]}, (2400, 1600)),  # a viewer shows the first
        (
            {"WindowCenter": -100, "WindowWidth": 700, "RescaleSlope": 0.5, "RescaleIntercept": -900},
            (-100, 700, 0.5, -900),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["MONOCHROME2", "MONOCHROME1"])
def test_grey_is_shown_through_the_files_window(reader, tags, window, kind):
    """Twelve bits of which a window takes a part, as in radiographs: without it they are nearly black."""
    stored = np.linspace(0, 4095, SHAPE[0] * SHAPE[1]).reshape(SHAPE).astype(np.uint16)
    found = reader.decode(dicom(stored, kind, BitsStored=12, HighBit=11, **tags)).pixels.astype(int)
    shown = np.vectorize(lambda value: as_shown(value, *window))(stored)
    assert np.abs(found - (255 - shown if kind == "MONOCHROME1" else shown)[:, :, None]).max() <= 0.5
    assert set(np.unique(found)) >= {0, 128, 255}


def test_the_exact_window_is_the_other_formula(reader):
    """DICOM PS3.3, C.11.2.1.3.2: ((x - c) / w + 0.5): of a window of 10 about 100 the ends are 95 and 105."""
    stored = np.array([[94, 95, 96, 100, 104, 105, 106]] * 7, np.uint8)
    data = dicom(stored, "MONOCHROME2", WindowCenter=100, WindowWidth=10, VOILUTFunction="LINEAR_EXACT")
    found = reader.decode(data).pixels[0, :, 1].astype(int)
    assert np.abs(found - [0, 0, 25.5, 127.5, 229.5, 255, 255]).max() <= 0.5


def test_the_window_of_a_jpeg_inside_counts_too(reader):
    pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    from pydicom.encaps import encapsulate

    inside = saved(scene()[:, :, 0], "JPEG", quality=95)
    frame = encapsulate([inside + b"\x00" * (len(inside) % 2)])
    window = {"WindowCenter": 128, "WindowWidth": 64}
    data = dicom(scene()[:, :, 0], "MONOCHROME2", syntax="1.2.840.10008.1.2.4.50", PixelData=frame, **window)
    wanted = np.vectorize(lambda value: as_shown(value, 128, 64))(np.asarray(Image.open(io.BytesIO(inside))))
    assert np.abs(reader.decode(data).pixels[:, :, 2] - wanted).max() <= 0.5


def test_grey_that_is_to_be_shown_in_another_way_is_refused(reader):
    """DICOM PS3.3, C.8.11.3: INVERSE is for MONOCHROME1, whose zero is white, and IDENTITY for MONOCHROME2; the other
    way round nobody knows. C.7.6.16: an "enhanced" object keeps its window in functional groups."""
    pydicom = pytest.importorskip("pydicom", reason=DICOM_EXTRA)
    grey, table = scene()[:, :, 0], pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [256, 0, 8], bytes(range(255, -1, -1))
    window = {"WindowCenter": 128, "WindowWidth": 256}
    group, inner = pydicom.Dataset(), pydicom.Dataset()
    inner.WindowCenter, inner.WindowWidth = 32, 64
    group.FrameVOILUTSequence = [inner]
    for tags in (
        {"PresentationLUTShape": "INVERSE"},
        {"PresentationLUTShape": "IDENTITY", "PhotometricInterpretation": "MONOCHROME1"},
        {"SharedFunctionalGroupsSequence": [group]},
        {"PerFrameFunctionalGroupsSequence": [group]},
        {**window, "VOILUTFunction": "SIGMOID"},
        {**window, "WindowWidth": 0},
        {"RescaleSlope": -1, "RescaleIntercept": 255},
        {"VOILUTSequence": [table]},
        {"ModalityLUTSequence": [table]},
    ):
        with pytest.raises(ImageError, match="export the picture as the viewer shows it") as refused:
            reader.decode(dicom(grey, "MONOCHROME2", **tags))
        assert refused.value.code == "unsupported_format"
    inverse = reader.decode(dicom(grey, "MONOCHROME1", PresentationLUTShape="INVERSE")).pixels
    np.testing.assert_array_equal(inverse[:, :, 0], 255 - grey)
    identity = dicom(grey, "MONOCHROME2", PresentationLUTShape="IDENTITY", **window)
    np.testing.assert_array_equal(reader.decode(identity).pixels[:, :, 0], grey)


def test_dicom_bits_in_other_places_are_refused(reader):
    """DICOM PS3.5, 8.1.1: high bit and bits stored; shifted by the wrong number they would be another picture."""
    twelve = scene()[:, :, 0].astype(np.uint16) << 4
    assert code_of(reader, dicom(twelve << 4, "MONOCHROME2", BitsStored=12, HighBit=15)) == "unsupported_format"
    six = scene()[:, :, 0] >> 2
    assert code_of(reader, dicom(six, "MONOCHROME2", BitsStored=6, HighBit=5)) == "unsupported_format"


def test_dicom_that_is_refused(reader):
    frames = dicom(np.concatenate([scene(), scene(1)]), "RGB", Rows=48, NumberOfFrames=2)
    assert code_of(reader, frames) == "animated"
    assert code_of(reader, dicom(scene(), "RGB", Rows=30_000, Columns=30_000)) == "too_large"
    assert code_of(reader, dicom(scene(), "RGB", Rows=480)) in ("truncated", "unreadable")
    assert code_of(reader, dicom(scene()[:, :, 0], "PALETTE COLOR")) == "unsupported_format"
    assert code_of(reader, bytes(128) + b"DICM" + bytes(50)) in ("truncated", "unreadable")


def test_no_name_and_no_tag_comes_back(reader):
    """docs/security.md check 36: what a second process answers is pixels or a sentence of ours."""
    with pytest.raises(ImageError) as refused:
        decode_safely("dicom", dicom(scene()[:, :, 0], "PALETTE COLOR"))
    assert "CANARY" not in str(refused.value)
    assert b"CANARY" not in reader.decode(dicom(scene(), "RGB")).pixels.tobytes()
