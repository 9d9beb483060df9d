"""Turn a finished run into a signed bundle for devices: graphs, parity gates, keys, and the command `edgefl-export`.

The rooms need the extra `edgefl-derm[export]`; `key_store` and `cli` work in the base install. Nothing is imported
here, so that `edgefl-export --help` stays quick.
"""
