"""Turn a finished run into a signed bundle for devices: graphs, parity gates, keys, and `edgefl-export`.

The rooms need the extra `edgefl-derm[export]`; `key_store`, `cli` and `commands` load in the base install.
Nothing is imported here, so that `edgefl-export --help` stays quick.
"""
