"""From a finished run to a signed bundle for devices: graph, parity gates, keys, and the command `edgefl-export`.

The modules `graph`, `gates` and `assemble` need the extra `edgefl[export]`; `key_store` and `cli` work in the base
install. Nothing is imported here, so that `edgefl-export --help` stays quick.
"""
