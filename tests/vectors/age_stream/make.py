"""Write `vectors.json` from the files of a checkout: python make.py CCTV/age/testdata."""

import base64
import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Keep the text header's facts and the age file of every `stream_*` vector."""
    vectors = {}
    for path in sorted(folder.glob("stream_*")):
        head, _, body = path.read_bytes().partition(b"\n\n")
        told = dict(line.split(": ", 1) for line in head.decode().splitlines())
        vectors[path.name] = {**told, "age": base64.b64encode(body).decode()}
    target = Path(__file__).with_name("vectors.json")
    target.write_text(json.dumps(vectors, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
