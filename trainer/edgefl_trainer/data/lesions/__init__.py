"""Drawn dermoscopic skin lesions: class signs, site styles and known masks, without any patient's picture.

image, mask = draw_lesion("MEL", site=0, number=7, px=128)
"""

from edgefl_trainer.data.lesions.pixels import draw_lesion, draw_skin, read_lesions
from edgefl_trainer.data.lesions.plan import OPTIONS, LesionSettings, parse_settings
from edgefl_trainer.data.lesions.signs import SIGNS

__all__ = ["OPTIONS", "SIGNS", "LesionSettings", "draw_lesion", "draw_skin", "parse_settings", "read_lesions"]
