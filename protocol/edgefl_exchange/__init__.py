"""Exchange with a coordinator: keys on the disk, sealed questions and signed answers, an outbox that survives crashes.

Free of any learning framework, so that a device and a GPU server join a federation with the same code. Import from its
modules: nothing is loaded here, because a device that only scores needs its trust records and no network.
"""
