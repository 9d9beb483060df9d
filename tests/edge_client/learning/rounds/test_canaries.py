"""What is planted in pictures stays here also when the device learns from them. Source: docs/security.md, check 36."""

import base64
import logging

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from edgefl_client.learning.own_pictures import Table, remember_table
from edgefl_protocol import Payload

MARK = "CANARY4711CANARY"


def test_a_learned_reply_holds_nothing_that_was_planted(device, school, tmp_path, caplog):
    """docs/security.md check 36: a FedEvPrompt reply learned from 54 pictures with EXIF, GPS, text, names and a table
    of canaries: 0 bytes in any request, payload, log or file but the note of where the owner's table lies.
    """
    caplog.set_level(logging.DEBUG)
    table = school.table(tmp_path / "pictures", spread=5)
    text = table.read_text()
    for path in sorted(table.parent.glob("*.png")):
        exif, info = Image.Exif(), PngInfo()
        exif[0x010E] = f"{MARK}-exif"
        exif.get_ifd(0x8825)[0x001B] = f"{MARK}-gps".encode()
        info.add_text("Patient", f"{MARK}-text")
        with Image.open(path) as image:
            image.save(path.with_name(f"{MARK}-{path.name}"), exif=exif, pnginfo=info)
        path.unlink()
        text = text.replace(f"\n{path.name},", f"\n{MARK}-{path.name},")
    assert text.count(MARK) == 54
    table.write_text(text)
    caplog.clear()  # Pillow tells of the tags that it wrote
    remember_table(device.home, Table(file=table))
    heard = []
    send, judge = device.coordinator.send, device.coordinator._judge
    device.coordinator.send = lambda request: heard.append(request.body) or send(request)
    device.coordinator._judge = lambda cty, opened: heard.append(opened.payload) or judge(cty, opened)
    try:
        found = device.report()
    finally:
        del device.coordinator.send, device.coordinator._judge
    assert found["learning"]["state"] == "done"
    ((_, _, content),) = device.coordinator.effects
    assert Payload.from_bytes(content).arrays
    out = b"".join(heard)
    assert len(out) > len(content)
    coded = {base64.b64encode(bytes(lead) + MARK.encode())[4:-4] for lead in (0, 1, 2)}
    for form in (MARK.encode(), MARK.encode().hex().encode(), MARK.encode("utf-16-le"), *coded):
        assert form not in out
    assert MARK not in caplog.text
    for path in device.home.root.rglob("*"):
        assert path.is_dir() or MARK.encode() not in path.read_bytes(), path
