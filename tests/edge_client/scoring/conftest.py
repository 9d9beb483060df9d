"""The words that are drawn into a picture."""

import pytest
from PIL import ImageDraw


@pytest.fixture
def said(monkeypatch):
    """What is written into the picture."""
    texts: list[str] = []
    original = ImageDraw.ImageDraw.text

    def spy(self, at, text, *args, **kwargs):
        texts.append(text)
        return original(self, at, text, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    return texts
