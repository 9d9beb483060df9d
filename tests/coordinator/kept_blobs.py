"""Which blobs a store has, asked of the place of the files and of the table of small ones."""

from sqlalchemy import select

from edgefl_coordinator.store import tables
from edgefl_coordinator.store.store import Store


def blob_names(store: Store) -> set[str]:
    """Return the names of all blobs that are there, files and rows."""
    with store.transaction() as connection:
        small = connection.scalars(select(tables.small_blobs.c.name)).all()
    return {*small, *store.payloads.names()}
