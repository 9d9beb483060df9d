"""Data of a federation: SPECs → rows → cached pictures → the rows of each site.

federation = load_federation(["manifest:fed.zip"], image_px=84, task="nevus")
federation.images[federation.places(federation.sites["msk"].train)]
"""

from edgefl_trainer.data.cache import default_cache_dir
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.federation import Federation, load_federation
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.site_rows import SiteRows

__all__ = ["DataError", "Federation", "Row", "SiteRows", "default_cache_dir", "load_federation"]
